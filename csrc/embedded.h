// SPDX-License-Identifier: BSD-3-Clause
// The kernel images that build.py writes into the extension.
#pragma once

// A fat binary of one .cu file (and format).
struct EmbeddedImage {
    const char* name;
    const unsigned char* data;
};
// A kernel and the number of the image that holds it.
struct EmbeddedKernel {
    const char* symbol;
    int image;
};
extern const EmbeddedImage embedded_images[];
extern const int num_embedded_images;
extern const EmbeddedKernel embedded_kernels[];
extern const int num_embedded_kernels;
