/* What a convolution of PyTorch asks of cuDNN besides its tensors: the workspace, with no GPU in sight.
 *
 * cuDNN 9.8 and later takes a description of a device in place of a device. vm_cudnn_conv builds the operation graph
 * that PyTorch's eager convolution builds, asks the heuristics in PyTorch's order and returns the first plan that can
 * be made. */
#ifndef VM_WORKSPACE_H
#define VM_WORKSPACE_H

#include "../../kernels/cudnn/cudnn_api.h"
#include "../vm.h"

/* How PyTorch's convolutions are asked as a vm_conv: one with a single dimension has two, with a height of 1; the bias
 * is added outside; where the paddings of two sides differ, PyTorch pads into a tensor of its own first; tf32 is
 * torch.backends.cudnn.allow_tf32, which is on by default. */

/* The plan that PyTorch would run. */
typedef struct vm_conv_plan {
    bool found;    /* false: no engine takes this convolution on this device; the rest is then zero */
    int64_t bytes; /* of workspace */
    int64_t least; /* with `every`: the fewest that this plan or a later one wants */
    int rank;      /* of its configuration in the heuristics' list; the fallback list counts on after it */
    int untried;   /* earlier ones that are compiled at run time, need the driver, and may be what a real device runs */
    bool fallback; /* it came from the fallback list */
    char name[VM_ENGINE_NAME]; /* "eng1_k2=3_k5=0": engine and knobs */
} vm_conv_plan;

/* every: also asks the plans to which PyTorch goes on where it cannot have this one's workspace. device_json: cuDNN's
 * device properties (vaemem/data/gpus.json). Thread-safe: one question at a time. VM_EINVAL where cuDNN does not
 * understand the device or the convolution; a plan that is not found is no error. */
vm_status vm_cudnn_conv(vm_cudnn *cudnn, const char *device_json, const vm_conv *conv, bool every, vm_conv_plan *out);

#endif
