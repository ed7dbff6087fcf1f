/* For capi.js: the data that Python's headers declare. An object of Python's is two words, which capi.js sets. */
#include <stdlib.h>

#define SHOWN __attribute__((visibility("default"), used))
typedef long object[2];

SHOWN object _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct, PyTuple_Type, PyList_Type, PyDict_Type, PyLong_Type,
    PyUnicode_Type, PyBool_Type, PyFloat_Type, PyBytes_Type;
static object errors[5];
SHOWN const void *const PyExc_TypeError = errors[0], *const PyExc_ValueError = errors[1],
                        *const PyExc_RuntimeError = errors[2], *const PyExc_OverflowError = errors[3],
                        *const PyExc_MemoryError = errors[4];
SHOWN void (*const free_pointer)(void *) = free;

/* The page runs no VAE: a PyType_Spec without slots in place of py_model.c's. */
static const long no_slots[2];
const void *const vm_py_model_type[] = {"vaemem._core.Model", (void *)sizeof(object), 0, 0, no_slots};
