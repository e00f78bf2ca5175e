// SPDX-License-Identifier: BSD-3-Clause
// The Python module vllm_superl8._C: every host half in one translation unit, since pybind11 costs seconds for each.
#include "host_halves.h"
#include "launch.h"

PYBIND11_MODULE(_C, m) {
    for (Binder bind : binders()) bind(m);
    m.def(
        "build_info", [] { return py::module_::import("json").attr("loads")(std::string(build_info_json)); },
        "version, archs, nvrtc, source_hash, images, kernels (registers, spills, local and shared bytes of each)");
}
