/* The CUDA driver, found at run time: libcuda.so.1 by dlopen, so that vaemem imports on machines without it.
 *
 * VM_DRIVER names each entry once. The types are those of <cuda.h>; no CUDA library is linked. */
#ifndef VM_DRIVER_H
#define VM_DRIVER_H

#include <cuda.h>

#include "../kernels.h"

/* name here, symbol in the library, parameters */
#define VM_DRIVER(X)                                                                                                  \
    X(Init, "cuInit", (unsigned))                                                                                     \
    X(DriverGetVersion, "cuDriverGetVersion", (int *))                                                                \
    X(DeviceGetCount, "cuDeviceGetCount", (int *))                                                                    \
    X(DeviceGet, "cuDeviceGet", (CUdevice *, int))                                                                    \
    X(DeviceGetName, "cuDeviceGetName", (char *, int, CUdevice))                                                      \
    X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *, CUdevice_attribute, CUdevice))                              \
    X(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *, CUdevice))                                                    \
    X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice))                                    \
    X(CtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext))                                                             \
    X(CtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext *))                                                             \
    X(CtxSynchronize, "cuCtxSynchronize", (void))                                                                     \
    X(MemGetInfo, "cuMemGetInfo_v2", (size_t *, size_t *))                                                            \
    X(MemGetAllocationGranularity, "cuMemGetAllocationGranularity",                                                   \
      (size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags))                                      \
    X(MemAlloc, "cuMemAlloc_v2", (CUdeviceptr *, size_t))                                                             \
    X(MemFree, "cuMemFree_v2", (CUdeviceptr))                                                                         \
    X(MemHostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                                    \
    X(MemFreeHost, "cuMemFreeHost", (void *))                                                                         \
    X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void *, size_t, CUstream))                         \
    X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *, CUdeviceptr, size_t, CUstream))                               \
    X(MemsetD8Async, "cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, CUstream))                               \
    X(StreamCreate, "cuStreamCreate", (CUstream *, unsigned))                                                         \
    X(StreamDestroy, "cuStreamDestroy_v2", (CUstream))                                                                \
    X(StreamWaitEvent, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))                                            \
    X(StreamIsCapturing, "cuStreamIsCapturing", (CUstream, CUstreamCaptureStatus *))                                  \
    X(StreamBeginCapture, "cuStreamBeginCapture_v2", (CUstream, CUstreamCaptureMode))                                 \
    X(StreamEndCapture, "cuStreamEndCapture", (CUstream, CUgraph *))                                                  \
    X(EventCreate, "cuEventCreate", (CUevent *, unsigned))                                                            \
    X(EventDestroy, "cuEventDestroy_v2", (CUevent))                                                                   \
    X(EventRecord, "cuEventRecord", (CUevent, CUstream))                                                              \
    X(EventQuery, "cuEventQuery", (CUevent))                                                                          \
    X(StreamSynchronize, "cuStreamSynchronize", (CUstream))                                                           \
    X(EventSynchronize, "cuEventSynchronize", (CUevent))                                                              \
    X(EventElapsedTime, "cuEventElapsedTime", (float *, CUevent, CUevent))                                            \
    X(ModuleLoadData, "cuModuleLoadData", (CUmodule *, const void *))                                                 \
    X(ModuleUnload, "cuModuleUnload", (CUmodule))                                                                     \
    X(ModuleGetFunction, "cuModuleGetFunction", (CUfunction *, CUmodule, const char *))                               \
    X(TensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                                 \
      (CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,                \
       const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,     \
       CUtensorMapFloatOOBfill))                                                                                      \
    X(FuncSetAttribute, "cuFuncSetAttribute", (CUfunction, CUfunction_attribute, int))                                \
    X(FuncGetAttribute, "cuFuncGetAttribute", (int *, CUfunction_attribute, CUfunction))                              \
    X(LaunchKernel, "cuLaunchKernel",                                                                                 \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)) \
    X(GraphInstantiate, "cuGraphInstantiateWithFlags", (CUgraphExec *, CUgraph, unsigned long long))                  \
    X(GraphLaunch, "cuGraphLaunch", (CUgraphExec, CUstream))                                                          \
    X(GraphExecDestroy, "cuGraphExecDestroy", (CUgraphExec))                                                          \
    X(GraphDestroy, "cuGraphDestroy", (CUgraph))                                                                      \
    X(GetErrorName, "cuGetErrorName", (CUresult, const char **))                                                      \
    X(GetErrorString, "cuGetErrorString", (CUresult, const char **))

typedef struct vm_driver {
#define VM_DRIVER_FIELD(NAME, SYMBOL, PARAMETERS) CUresult(*NAME) PARAMETERS;
    VM_DRIVER(VM_DRIVER_FIELD)
#undef VM_DRIVER_FIELD
    int version; /* 1000 * major + 10 * minor of the supported CUDA */
} vm_driver;

enum { VM_DRIVER_LEAST = 12000 };

/* Returns: the driver of this process, loaded by the first call from path (NULL: libcuda.so.1) and kept until the
 * process ends. NULL, with vm_error() set, if there is none or it is too old. */
const vm_driver *vm_driver_get(const char *path);
/* Returns: VM_OK, or vm_fail with `doing` and the driver's own message. */
vm_status vm_driver_check(const vm_driver *d, CUresult result, const char *doing);

#endif
