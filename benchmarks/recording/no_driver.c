/* A CUDA driver without a device, for machines that have no driver.
 *
 * cuDNN 9.28 and later do not load without a libcuda.so.1, although they call nothing in it to describe a device and to
 * size a workspace. This library has that soname and the entry points that cuDNN links to. Each returns
 * CUDA_ERROR_NO_DEVICE. Only the process that asks cuDNN loads it (ask_cudnn.py). */
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
