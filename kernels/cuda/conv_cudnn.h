/* Convolutions by cuDNN's graph API, with a cache of their plans. */
#ifndef VM_CONV_CUDNN_H
#define VM_CONV_CUDNN_H

#include "../cudnn/cudnn_api.h"

/* x [h][w][c] * filters [k][side][side][c] -> y [(h - side) / stride + 1][(w - side) / stride + 1][k]: n is 1, NHWC,
 * packed, no padding, float sums. tf32: float factors may be rounded to 10 bits. */
typedef struct vm_conv_key {
    vm_conv conv;
    size_t limit; /* most bytes of workspace for the plan */
} vm_conv_key;

/* Returns: how long a candidate takes, in any unit; negative if it failed. run(job) enqueues it once. */
typedef double (*vm_conv_timer)(void *context, vm_status (*run)(void *job), void *job);

/* The plans of one device, kept until all are freed. Thread-safe: calls wait for each other. */
typedef struct vm_cudnn_convs vm_cudnn_convs;

/* path: libcudnn.so.9, or NULL for the process's copy or the loader's. device_json: cuDNN's description of a device to
 * plan for (nothing runs then), or NULL: the current context's. */
vm_status vm_cudnn_convs_new(const char *path, const char *device_json, vm_cudnn_convs **out);
void vm_cudnn_convs_free(vm_cudnn_convs *convs);
/* Called before and after cuDNN makes a plan or first runs one, when it may allocate device memory for its code. begin:
 * the call before. *free: what was free then, filled before. */
typedef vm_status (*vm_conv_watch)(void *context, bool begin, size_t *free);
void vm_cudnn_convs_watch(vm_cudnn_convs *convs, vm_conv_watch watch, void *context);
size_t vm_cudnn_convs_version(const vm_cudnn_convs *convs);
/* Finds or makes the plan. *bytes: its workspace, the same in every run until tuned. VM_EINVAL: not a convolution;
 * VM_EDEVICE: no engine supports it within the limit. */
vm_status vm_cudnn_convs_bytes(vm_cudnn_convs *convs, const vm_conv_key *key, size_t *bytes);
/* Returns: the engine and knobs of a plan, borrowed until vm_cudnn_convs_free; NULL if it was not planned. */
const char *vm_cudnn_convs_name(const vm_cudnn_convs *convs, const vm_conv_key *key);
size_t vm_cudnn_convs_count(const vm_cudnn_convs *convs);
/* Writes the plan at index, the newest first, as a line of text. Returns: false if index is not below the count. */
bool vm_cudnn_convs_describe(const vm_cudnn_convs *convs, size_t index, char *text, size_t size);
/* Enqueues the convolution on the stream. */
vm_status vm_cudnn_convs_run(vm_cudnn_convs *convs, const vm_conv_key *key, void *stream, const void *x,
                             const void *filters, void *y, void *workspace);
/* At the first call for a key: runs the candidates on the given memory (workspace: key->limit bytes) and keeps the
 * fastest, or the first if none could be timed. timer waits for the stream. It is called under the lock, and may call
 * nothing of convs but run. */
vm_status vm_cudnn_convs_tune(vm_cudnn_convs *convs, const vm_conv_key *key, void *stream, const void *x,
                              const void *filters, void *y, void *workspace, vm_conv_timer timer, void *context);

#endif
