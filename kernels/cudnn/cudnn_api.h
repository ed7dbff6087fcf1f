/* cuDNN's backend API without its headers and without linking it: the numbers, the loader and a few helpers, for the
 * code that runs cuDNN (kernels/cuda/conv_cudnn.c) and the benchmark that queries it
 * (benchmarks/recording/ask_cudnn.c).
 *
 *   open: dlopen -> the entry points below -> version
 *   conv: tensors x, w, y + convolution -> operation -> graph
 *   then: heuristics(graph, device) -> configurations, best first -> a plan
 *
 * Names and numbers are those of the public header cudnn_graph.h, which keeps them within major version 9. */
#ifndef VM_CUDNN_API_H
#define VM_CUDNN_API_H

#include <pthread.h>

#include "conv.h"

typedef void *desc;

/* cudnnBackendDescriptorType_t */
enum { CONVOLUTION = 1, ENGINE, ENGINECFG, ENGINEHEUR, EXECUTION_PLAN, KNOB_CHOICE = 7 };
enum {
    OPERATION_CONVOLUTION_FORWARD = 10,
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12,
    OPERATIONGRAPH = 15,
    VARIANT_PACK,
    TENSOR,
    DEVICEPROP = 38
};

/* cudnnBackendAttributeName_t, grouped by descriptor */
enum { CONVOLUTION_COMP_TYPE = 100, CONVOLUTION_CONV_MODE, CONVOLUTION_DILATIONS, CONVOLUTION_FILTER_STRIDES };
enum { CONVOLUTION_POST_PADDINGS = 104, CONVOLUTION_PRE_PADDINGS, CONVOLUTION_SPATIAL_DIMS };
enum { ENGINEHEUR_MODE = 200, ENGINEHEUR_OPERATION_GRAPH, ENGINEHEUR_RESULTS, ENGINEHEUR_DEVICEPROP = 204 };
enum { ENGINECFG_ENGINE = 300, ENGINECFG_KNOB_CHOICES = 302 };
enum { EXECUTION_PLAN_HANDLE = 400, EXECUTION_PLAN_ENGINE_CONFIG, EXECUTION_PLAN_WORKSPACE_SIZE };
enum { EXECUTION_PLAN_DEVICEPROP = 407 };
enum { KNOB_CHOICE_KNOB_TYPE = 600, KNOB_CHOICE_KNOB_VALUE };
/* OPERATION_CONVOLUTION_BACKWARD_DATA has the same order, with dx instead of x and dy instead of y. */
enum { FORWARD_ALPHA = 700, FORWARD_BETA, FORWARD_CONV_DESC, FORWARD_W, FORWARD_X, FORWARD_Y };
enum { BACKWARD_DATA_ALPHA = 706 };
enum { OPERATIONGRAPH_HANDLE = 800, OPERATIONGRAPH_OPS };
enum { TENSOR_BYTE_ALIGNMENT = 900, TENSOR_DATA_TYPE, TENSOR_DIMENSIONS, TENSOR_STRIDES, TENSOR_UNIQUE_ID = 906 };
enum { VARIANT_PACK_UNIQUE_IDS = 1000, VARIANT_PACK_DATA_POINTERS, VARIANT_PACK_WORKSPACE = 1003 };
enum { ENGINE_GLOBAL_INDEX = 1301, ENGINE_NUMERICAL_NOTE = 1303, ENGINE_BEHAVIOR_NOTE = 1305 };
enum { DEVICEPROP_JSON_REPRESENTATION = 2702 };

/* cudnnBackendAttributeType_t */
enum { T_HANDLE, T_DATA_TYPE, T_INT64 = 3, T_FLOAT, T_VOID_PTR = 6, T_CONVOLUTION_MODE, T_HEUR_MODE, T_KNOB_TYPE };
enum { T_NUMERICAL_NOTE = 11, T_DESC = 15, T_BEHAVIOR_NOTE = 19, T_CHAR = 24 };

enum { DATA_FLOAT = 0, DATA_HALF = 2, DATA_BFLOAT16 = 9 };
enum { CROSS_CORRELATION = 1, HEUR_INSTANT = 0, HEUR_FALLBACK = 2, HEUR_A = 3 };
/* cudnnBackendNumericalNote_t */
enum { NOTE_TENSOR_CORE, NOTE_DOWN_CONVERT_INPUTS, NOTE_REDUCED_PRECISION_REDUCTION, NOTE_FFT, NOTE_NONDETERMINISTIC };
enum { NOTE_WINOGRAD_TILE_4x4 = 6, NOTE_WINOGRAD_TILE_6x6, NOTE_WINOGRAD_TILE_13x13 };
enum { BEHAVIOR_RUNTIME_COMPILATION = 0 };
enum { STATUS_DEVICE_ALLOCATION_FAILED = 4004 }; /* cudnnStatus_t */
enum { MAX_CONFIGS = 256, MAX_DESCS = 16 };

/* A library. The last four entries are NULL if it has none, and cannot run. */
typedef struct vm_cudnn {
    pthread_mutex_t lock; /* held by the user during queries */
    size_t version;       /* 10000 * major + 100 * minor + patch */
    int (*create)(int type, desc *out);
    int (*destroy)(desc d);
    int (*set)(desc d, int name, int type, int64_t count, const void *values);
    int (*get)(desc d, int name, int type, int64_t room, int64_t *count, void *values);
    int (*finalize)(desc d);
    size_t (*get_version)(void);
    const char *(*status_name)(int status);
    void (*last_error)(char *text, size_t room);
    int (*create_handle)(void **out);
    int (*destroy_handle)(void *handle);
    int (*set_stream)(void *handle, void *stream);
    int (*execute)(void *handle, desc plan, desc pack);
} vm_cudnn;

/* Loads libcudnn: the copy that this process already has, otherwise the file `path`, or the loader's if path is NULL.
 * It stays loaded after vm_cudnn_close.
 * Returns: VM_EDEVICE if there is no cuDNN, if it is older than `least`, or if it finds no cuBLASLt. */
vm_status vm_cudnn_open(const char *path, size_t least, vm_cudnn **out);
void vm_cudnn_close(vm_cudnn *cudnn);

/* One query: its descriptors, destroyed together, and the first failing status, after which nothing runs. */
typedef struct vm_cudnn_question {
    vm_cudnn *c;
    int status;
    const char *step;
    size_t descs;
    desc desc[MAX_DESCS];
} vm_cudnn_question;

desc vm_cudnn_make(vm_cudnn_question *q, int type);
void vm_cudnn_set(vm_cudnn_question *q, desc d, int name, int type, int64_t count, const void *values);
void vm_cudnn_finalize(vm_cudnn_question *q, desc d, const char *what);
/* The operation graph, with unique ids 'x', 'w', 'y' of input, filter and output; for a handle's device, or NULL for a
 * described one. */
desc vm_cudnn_graph(vm_cudnn_question *q, const vm_conv *conv, void *handle);
/* json: cuDNN's device properties (vaemem/data/gpus.json). */
desc vm_cudnn_device(vm_cudnn_question *q, const char *json);
/* One list of the heuristics, best first; transfers to the caller. Returns: how many, 0 if cuDNN refuses to make the
 * list. device: NULL for the handle's. */
int64_t vm_cudnn_configs(vm_cudnn_question *q, desc graph, desc device, int mode, desc config[MAX_CONFIGS]);
/* Destroys the descriptors. Returns: VM_OK, or `otherwise` with the failing step and cuDNN's own message. */
vm_status vm_cudnn_end(vm_cudnn_question *q, vm_status otherwise);

/* VM_EINVAL if a size is out of range, groups do not divide the channels, or the output is empty. */
vm_status vm_cudnn_check(const vm_conv *conv);

enum { VM_ENGINE_NAME = 256 };

/* The outcome of a configuration. */
typedef struct vm_cudnn_plan {
    desc plan;                 /* owned by the caller; NULL: none */
    int64_t bytes;             /* of workspace */
    int engine;                /* cuDNN's index */
    char name[VM_ENGINE_NAME]; /* "eng1_k2=3_k5=0": engine and knobs */
    bool compiles;             /* no plan: the engine, which has none of the notes, would be compiled at run time */
} vm_cudnn_plan;

/* Makes a plan of a configuration, which must outlive it, for a described device or, if NULL, for the handle's. No plan
 * if its engine has one of the numerical notes in `bad`, or does not report them. */
vm_cudnn_plan vm_cudnn_try(vm_cudnn *c, desc config, uint32_t bad, desc device, void *handle);

#endif
