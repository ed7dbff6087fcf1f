/* What the bindings of both extensions, vaemem._core and vaemem._cuda, know. */
#ifndef VM_PY_SHARED_H
#define VM_PY_SHARED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../kernels/kernels.h"

/* The name of capsules that hold a vm_backend with a device: vaemem._cuda makes them, vaemem._core takes them. */
#define vm_py_backend_name "vaemem.backend"

/* -1 with an exception set where it is no type of ours. */
static inline int vm_py_parse_dtype(const char *name, vm_dtype *out) {
    for (*out = VM_F32; *out <= VM_BF16; (*out)++)
        if (!strcmp(name, vm_dtype_name(*out))) return 0;
    PyErr_Format(PyExc_ValueError, "dtype: want float32, float16 or bfloat16, got '%s'", name);
    return -1;
}

#endif
