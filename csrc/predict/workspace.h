/* What a convolution of PyTorch asks of cuDNN besides its tensors: the workspace, with no GPU in sight.
 *
 * cuDNN 9.8 and later takes a description of a device in place of a device. vm_cudnn_conv builds the operation graph
 * that PyTorch's eager convolution builds, asks the heuristics in PyTorch's order and returns the first plan that can
 * be made. */
#ifndef VM_WORKSPACE_H
#define VM_WORKSPACE_H

#include "../vm.h"

enum { VM_CUDNN_MIN_VERSION = 90800, VM_ENGINE_NAME = 256 };

/* A forward convolution of PyTorch: cross-correlation, no dilation, one group, bias added outside. The same padding on
 * both sides; an unequal one is a padded tensor of its own in PyTorch. */
typedef struct vm_conv {
    vm_dtype dtype;     /* of input, filter and output; sums are float */
    bool tf32;          /* float input may run on TF32 tensor cores: torch.backends.cudnn.allow_tf32 (on by default) */
    bool nhwc;          /* channels_last tensors */
    int64_t n, c, h, w; /* input */
    int64_t k, r, s;    /* filters, their height and width */
    int64_t padding, stride;
} vm_conv;

/* The plan that PyTorch would run. */
typedef struct vm_conv_plan {
    bool found;    /* false: no engine takes this convolution on this device; the rest is then zero */
    int64_t bytes; /* of workspace */
    int engine;    /* cuDNN's index */
    int rank;      /* of its configuration in the heuristics' list; the fallback list counts on after it */
    int untried;   /* earlier ones that are compiled at run time, need the driver, and may be what a real device runs */
    bool fallback; /* it came from the fallback list */
    char name[VM_ENGINE_NAME]; /* "eng1_k2=3_k5=0": engine and knobs */
} vm_conv_plan;

typedef struct vm_cudnn vm_cudnn;

/* Loads libcudnn: the copy that this process already has, or else path (a file), or where NULL the loader's. no_driver:
 * the library that stands in for libcuda.so.1 where there is none (csrc/no_driver), or NULL. All stay loaded after
 * vm_cudnn_close. VM_EINVAL where there is no cuDNN, one older than VM_CUDNN_MIN_VERSION, or no cuBLASLt for it. */
vm_status vm_cudnn_open(const char *path, const char *no_driver, vm_cudnn **out);
void vm_cudnn_close(vm_cudnn *cudnn);
/* 10000 * major + 100 * minor + patch. */
size_t vm_cudnn_version(const vm_cudnn *cudnn);
/* device_json: cuDNN's device properties (vaemem/data/gpus.json). Thread-safe: one question at a time.
 * VM_EINVAL where cuDNN does not understand the device or the convolution; a plan that is not found is no error. */
vm_status vm_cudnn_conv(vm_cudnn *cudnn, const char *device_json, const vm_conv *conv, vm_conv_plan *out);

#endif
