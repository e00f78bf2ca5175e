# SPDX-License-Identifier: BSD-3-Clause
"""What ``superl8 diagnose`` is made of: a capture of both models, their distance, and its report."""
