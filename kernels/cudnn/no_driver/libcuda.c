/* A CUDA driver that has no device, for machines without one.
 *
 * cuDNN's later versions (9.28 at least) do not load without a libcuda.so.1 beside them, though describing a device and
 * sizing a workspace call nothing in it. This library has that soname and the entry points that cuDNN links to; each
 * says CUDA_ERROR_NO_DEVICE. It is loaded only where there is no driver, and only by the process that asks cuDNN. */
enum { CUDA_ERROR_NO_DEVICE = 100 };

#define NO_DEVICE(name)                                    \
    __attribute__((visibility("default"))) int name(void); \
    int name(void) { return CUDA_ERROR_NO_DEVICE; }

NO_DEVICE(cuGetErrorString)
NO_DEVICE(cuModuleGetFunction)
NO_DEVICE(cuModuleLoadData)
NO_DEVICE(cuModuleUnload)
NO_DEVICE(cuTensorMapEncodeIm2col)
NO_DEVICE(cuTensorMapEncodeTiled)
