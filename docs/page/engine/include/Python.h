/* The part of Python's C API that csrc/python uses, for WebAssembly. capi.js has the functions.
 *
 * A PyObject * is the address of an object of our own types, which is even, or else an odd number that stands for an
 * object of the interpreter. Fixed numbers stand for the objects of capi.js's list FIXED. */
#ifndef VM_PAGE_PYTHON_H
#define VM_PAGE_PYTHON_H

#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define PY_VERSION_HEX 0x030b00f0
#define PY_SSIZE_T_MAX PTRDIFF_MAX
typedef ssize_t Py_ssize_t;

typedef struct _object PyObject;
typedef PyObject PyTypeObject;
typedef PyObject PyThreadState;
struct _object {
    Py_ssize_t ob_refcnt; /* of the references that C holds */
};
#define PyObject_HEAD PyObject ob_base;
#define VM_FIXED(n) ((PyObject *)(2 * (n) + 1))
#define Py_None VM_FIXED(0)
#define Py_True VM_FIXED(1)
#define Py_False VM_FIXED(2)
#define PyExc_TypeError VM_FIXED(3)
#define PyExc_ValueError VM_FIXED(4)
#define PyExc_RuntimeError VM_FIXED(5)
#define PyExc_OverflowError VM_FIXED(6)
#define PyExc_MemoryError VM_FIXED(7)
#define PyExc_KeyError VM_FIXED(8)
#define PyTuple_Type (*VM_FIXED(9))
#define PyList_Type (*VM_FIXED(10))
#define PyDict_Type (*VM_FIXED(11))
#define PyLong_Type (*VM_FIXED(12))
#define PyUnicode_Type (*VM_FIXED(13))
#define PyBool_Type (*VM_FIXED(14))
#define PyFloat_Type (*VM_FIXED(15))
#define PyBytes_Type (*VM_FIXED(16))
#define PyArray_Type (*VM_FIXED(17))

typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef PyObject *(*getter)(PyObject *, void *);
typedef int (*setter)(PyObject *, PyObject *, void *);
typedef int (*visitproc)(PyObject *, void *);
typedef void (*destructor)(PyObject *);
typedef void (*freefunc)(void *);
typedef struct PyMethodDef {
    const char *ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;
typedef struct PyGetSetDef {
    const char *name;
    getter get;
    setter set;
    const char *doc;
    void *closure;
} PyGetSetDef;
typedef struct PyType_Slot {
    int slot;
    void *pfunc;
} PyType_Slot;
typedef struct PyType_Spec {
    const char *name;
    int basicsize, itemsize;
    unsigned flags;
    PyType_Slot *slots;
} PyType_Spec;
typedef struct PyModuleDef_Slot {
    int slot;
    void *value;
} PyModuleDef_Slot;
typedef struct PyModuleDef {
    int m_base;
    const char *m_name, *m_doc;
    Py_ssize_t m_size;
    PyMethodDef *m_methods;
    PyModuleDef_Slot *m_slots;
} PyModuleDef;
typedef struct Py_buffer {
    void *buf;
    PyObject *obj;
    Py_ssize_t len;
} Py_buffer;
enum { METH_VARARGS = 1, METH_KEYWORDS = 2, METH_NOARGS = 4, METH_O = 8, METH_CLASS = 16, METH_STATIC = 32 };
enum {
    Py_tp_base = 1,
    Py_tp_clear,
    Py_tp_dealloc,
    Py_tp_doc,
    Py_tp_free,
    Py_tp_getset,
    Py_tp_methods,
    Py_tp_new,
    Py_tp_traverse,
    Py_mod_exec
};
enum { Py_TPFLAGS_DEFAULT = 0, Py_TPFLAGS_IMMUTABLETYPE = 0, Py_TPFLAGS_BASETYPE = 0, Py_TPFLAGS_HAVE_GC = 0 };
#define PyModuleDef_HEAD_INIT 0
#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *
#define Py_UNUSED(name) unused_##name __attribute__((unused))
#define PyMem_Malloc malloc
#define PyMem_Calloc calloc
#define PyMem_Realloc realloc
#define PyMem_Free free

/* One thread, no signals. */
typedef int *PyThread_type_lock;
typedef int PyLockStatus;
enum { PY_LOCK_FAILURE, PY_LOCK_ACQUIRED };
#define Py_BEGIN_ALLOW_THREADS {
#define Py_END_ALLOW_THREADS }
#define PyEval_SaveThread() NULL
#define PyEval_RestoreThread(state) ((void)(state))
#define PyThread_get_thread_ident() 1ul
#define PyThread_allocate_lock() ((int *)calloc(1, sizeof(int)))
#define PyThread_free_lock free
#define PyThread_release_lock(lock) ((void)(*(lock) = 0))
#define PyThread_acquire_lock_timed(lock, us, intr) (*(lock) ? PY_LOCK_FAILURE : (*(lock) = PY_LOCK_ACQUIRED))
#define PyErr_CheckSignals() 0
#define PyObject_GC_UnTrack(o) ((void)(o))
#define Py_VISIT(o) ((void)(o), (void)visit, (void)arg)

void Py_INCREF_(PyObject *);
void Py_DECREF_(PyObject *);
#define Py_INCREF(o) Py_INCREF_((PyObject *)(o))
#define Py_DECREF(o) Py_DECREF_((PyObject *)(o))
static inline PyObject *vm_new_ref(PyObject *o) {
    Py_INCREF(o);
    return o;
}
#define Py_NewRef(o) vm_new_ref((PyObject *)(o))
static inline void vm_xdecref(PyObject *o) {
    if (o) Py_DECREF(o);
}
#define Py_XDECREF(o) vm_xdecref((PyObject *)(o))
#define Py_CLEAR(o)                      \
    do {                                 \
        PyObject *old = (PyObject *)(o); \
        (o) = NULL;                      \
        vm_xdecref(old);                 \
    } while (0)
#define Py_RETURN_NONE return Py_None

PyTypeObject *Py_TYPE_(PyObject *);
#define Py_TYPE(o) Py_TYPE_((PyObject *)(o))
/* Whether an object is of a type, or of one derived from it; `exact`: or not. */
int vm_instance(PyObject *, PyTypeObject *, int exact);
#define PyObject_TypeCheck(o, type) vm_instance((PyObject *)(o), type, 0)
#define PyTuple_Check(o) vm_instance((PyObject *)(o), &PyTuple_Type, 0)
#define PyTuple_CheckExact(o) vm_instance((PyObject *)(o), &PyTuple_Type, 1)
#define PyList_Check(o) vm_instance((PyObject *)(o), &PyList_Type, 0)
#define PyList_CheckExact(o) vm_instance((PyObject *)(o), &PyList_Type, 1)
#define PyDict_Check(o) vm_instance((PyObject *)(o), &PyDict_Type, 0)
#define PyDict_CheckExact(o) vm_instance((PyObject *)(o), &PyDict_Type, 1)
#define PyLong_Check(o) vm_instance((PyObject *)(o), &PyLong_Type, 0)
#define PyLong_CheckExact(o) vm_instance((PyObject *)(o), &PyLong_Type, 1)
#define PyUnicode_Check(o) vm_instance((PyObject *)(o), &PyUnicode_Type, 0)
#define PyUnicode_CheckExact(o) vm_instance((PyObject *)(o), &PyUnicode_Type, 1)
#define PyBool_Check(o) vm_instance((PyObject *)(o), &PyBool_Type, 1)
#define PyFloat_CheckExact(o) vm_instance((PyObject *)(o), &PyFloat_Type, 1)
#define PyBytes_CheckExact(o) vm_instance((PyObject *)(o), &PyBytes_Type, 1)

int PyArg_ParseTuple(PyObject *, const char *, ...);
int PyArg_ParseTupleAndKeywords(PyObject *, PyObject *, const char *, char **, ...);
int PyArg_Parse(PyObject *, const char *, ...);
PyObject *Py_BuildValue(const char *, ...);
void PyBuffer_Release(Py_buffer *);
int PyCallable_Check(PyObject *);
void *PyCapsule_GetPointer(PyObject *, const char *);
PyObject *PyCapsule_New(void *, const char *, destructor);
PyObject *PyBytes_FromStringAndSize(const char *, Py_ssize_t);
PyObject *PyDict_New(void);
PyObject *PyDict_Copy(PyObject *);
PyObject *PyDict_GetItemString(PyObject *, const char *);
int PyDict_SetItemString(PyObject *, const char *, PyObject *);
int PyDict_SetItem(PyObject *, PyObject *, PyObject *);
int PyDict_Next(PyObject *, Py_ssize_t *, PyObject **, PyObject **);
void PyErr_Clear(void);
int PyErr_ExceptionMatches(PyObject *);
void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
void PyErr_Restore(PyObject *, PyObject *, PyObject *);
PyObject *PyErr_Format(PyObject *, const char *, ...);
PyObject *PyErr_NewExceptionWithDoc(const char *, const char *, PyObject *, PyObject *);
PyObject *PyErr_NoMemory(void);
PyObject *PyErr_Occurred(void);
void PyErr_SetObject(PyObject *, PyObject *);
void PyErr_SetString(PyObject *, const char *);
double PyFloat_AsDouble(PyObject *);
PyObject *PyFloat_FromDouble(double);
PyObject *PyImport_ImportModule(const char *);
int PyList_Append(PyObject *, PyObject *);
PyObject *PyList_AsTuple(PyObject *);
PyObject *PyList_GetItem(PyObject *, Py_ssize_t);
PyObject *PyList_New(Py_ssize_t);
int PyList_SetItem(PyObject *, Py_ssize_t, PyObject *);
Py_ssize_t PyList_Size(PyObject *);
long PyLong_AsLong(PyObject *);
long long PyLong_AsLongLong(PyObject *);
size_t PyLong_AsSize_t(PyObject *);
unsigned long PyLong_AsUnsignedLong(PyObject *);
unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
PyObject *PyLong_FromLong(long);
PyObject *PyLong_FromLongLong(long long);
PyObject *PyLong_FromSize_t(size_t);
PyObject *PyLong_FromUnsignedLong(unsigned long);
PyObject *PyLong_FromUnsignedLongLong(unsigned long long);
PyObject *PyBool_FromLong(long);
PyObject *PyModuleDef_Init(PyModuleDef *);
int PyModule_AddFunctions(PyObject *, PyMethodDef *);
int PyModule_AddObjectRef(PyObject *, const char *, PyObject *);
int PyModule_AddType(PyObject *, PyTypeObject *);
PyObject *PyNumber_Index(PyObject *);
PyObject *PyObject_CallFunction(PyObject *, const char *, ...);
PyObject *PyObject_CallMethod(PyObject *, const char *, const char *, ...);
PyObject *PyObject_GetAttrString(PyObject *, const char *);
int PyObject_IsTrue(PyObject *);
int PyObject_SetAttrString(PyObject *, const char *, PyObject *);
PyObject *PySequence_Concat(PyObject *, PyObject *);
PyObject *PySequence_Tuple(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
PyObject *PyTuple_New(Py_ssize_t);
PyObject *PyTuple_Pack(Py_ssize_t, ...);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyType_FromModuleAndSpec(PyObject *, PyType_Spec *, PyObject *);
PyObject *PyType_GenericAlloc(PyTypeObject *, Py_ssize_t);
PyObject *PyType_GetModule(PyTypeObject *);
PyObject *PyType_GetName(PyTypeObject *);
void *PyType_GetSlot(PyTypeObject *, int);
const char *PyUnicode_AsUTF8AndSize(PyObject *, Py_ssize_t *);
int PyUnicode_CompareWithASCIIString(PyObject *, const char *);
PyObject *PyUnicode_DecodeUTF8(const char *, Py_ssize_t, const char *);
PyObject *PyUnicode_FromFormat(const char *, ...);
PyObject *PyUnicode_FromFormatV(const char *, va_list);
PyObject *PyUnicode_FromString(const char *);
PyObject *PyUnicode_Split(PyObject *, PyObject *, Py_ssize_t);

#endif
