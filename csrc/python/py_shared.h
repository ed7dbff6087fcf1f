/* Shared by the bindings of both extensions, vaemem._core and vaemem._cuda. */
#ifndef VM_PY_SHARED_H
#define VM_PY_SHARED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../kernels/kernels.h"

/* The name of capsules that hold a vm_backend with a device: vaemem._cuda makes them, vaemem._core uses them. */
#define vm_py_backend_name "vaemem.backend"

/* A method with keywords, cast for PyMethodDef. */
#define VM_PY_KEYWORDS(f) ((PyCFunction)(void (*)(void))(f))

/* Makes an error of a class of ArgumentErrors, of VM_EXPECTED_IN's parts, or of one text. Steals the text. */
static inline PyObject *vm_py_argument_error(const char *class, PyObject *text) {
    PyObject *separator = PyUnicode_FromString(VM_SPLIT), *module = PyImport_ImportModule("vaemem._errors");
    PyObject *part = text && separator && module ? PyUnicode_Split(text, separator, 3) : NULL, *error = NULL;
    if (part && PyList_Size(part) == 4)
        error = PyObject_CallMethod(module, class, "OOOsO", PyList_GetItem(part, 0), PyList_GetItem(part, 2),
                                    PyList_GetItem(part, 3), "", PyList_GetItem(part, 1));
    else if (part)
        error = PyObject_CallMethod(module, class, "ssO", "", "", text);
    Py_XDECREF(text);
    Py_XDECREF(separator);
    Py_XDECREF(module);
    Py_XDECREF(part);
    return error;
}

/* Raises an ArgumentError for ValueError, an ArgumentTypeError for TypeError, an ArgumentOverflowError for
 * OverflowError. format: as PyErr_Format takes it, also VM_EXPECTED. Returns: NULL. */
static inline PyObject *vm_py_refuse(PyObject *type, const char *format, ...) {
    va_list args;
    PyErr_Clear(); /* another one that this replaces */
    va_start(args, format);
    PyObject *text = PyUnicode_FromFormatV(format, args);
    va_end(args);
    const char *const class = type == PyExc_TypeError       ? "ArgumentTypeError"
                              : type == PyExc_OverflowError ? "ArgumentOverflowError"
                                                            : "ArgumentError";
    PyObject *error = vm_py_argument_error(class, text);
    if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return NULL;
}

/* Raises an ArgumentTypeError that names the object's type. wanted: words for the expected one. Returns: NULL. */
static inline PyObject *vm_py_refuse_type(const char *argument, const char *wanted, PyObject *object) {
    PyErr_Clear();
    PyObject *name = PyType_GetName(Py_TYPE(object));
    if (name) vm_py_refuse(PyExc_TypeError, VM_EXPECTED("%s", "%s", "%U"), argument, wanted, name);
    Py_XDECREF(name);
    return NULL;
}

/* Whether an object is of the type with this tp_dealloc, or of a type derived from it. */
static inline bool vm_py_is(PyObject *object, destructor dealloc) {
    PyTypeObject *type = Py_TYPE(object);
    while (type && PyType_GetSlot(type, Py_tp_dealloc) != (void *)dealloc) type = PyType_GetSlot(type, Py_tp_base);
    return type != NULL;
}

/* Raises the status as a Python exception with vm_error(), unless one is set. Returns: NULL. */
static inline PyObject *vm_py_raise(vm_status status) {
    if (PyErr_Occurred()) return NULL;
    if (status == VM_EINVAL) return vm_py_refuse(PyExc_ValueError, "%s", vm_error_parts());
    if (status == VM_EOVERFLOW) return vm_py_refuse(PyExc_OverflowError, "%s", vm_error_parts());
    PyErr_SetString(status == VM_ENOMEM ? PyExc_MemoryError : PyExc_RuntimeError, vm_error());
    return NULL;
}

/* Returns: 0, or -1 with an exception set: the one that Python code raised meanwhile, or the core's. */
static inline int vm_py_check(vm_status status) {
    if (status) vm_py_raise(status);
    return status ? -1 : 0;
}

static inline PyObject *vm_py_none_or_raise(vm_status status) {
    return status ? vm_py_raise(status) : Py_NewRef(Py_None);
}

/* Returns: a new object; on failure frees it, raises the status and returns NULL. */
static inline PyObject *vm_py_made(PyObject *self, vm_status status) {
    if (!status) return self;
    Py_DECREF(self);
    return vm_py_raise(status);
}

/* Returns: a list of item(context, i) for each i below n; skips NULL without an exception. Can be interrupted. */
static inline PyObject *vm_py_list(size_t n, PyObject *(*item)(const void *context, size_t i), const void *context) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *one = item(context, i);
        if (one ? PyList_Append(list, one) : PyErr_Occurred() != NULL) Py_CLEAR(list);
        Py_XDECREF(one);
        if (list && i % (1 << 16) == (1 << 16) - 1 && PyErr_CheckSignals()) Py_CLEAR(list);
    }
    return list;
}

/* Makes a type and adds it to the module; -1 with an exception set. */
static inline int vm_py_add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    const int failed = !type || PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

/* The end of every tp_dealloc: frees the object, and releases its type. */
static inline void vm_py_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* For PyArg_ParseTuple's O&: a vm_dtype. */
static inline int vm_py_to_dtype(PyObject *name, void *out) {
    vm_dtype *dtype = out;
    for (*dtype = VM_F32; *dtype <= VM_BF16; (*dtype)++)
        if (PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, vm_dtype_name(*dtype))) return 1;
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED("dtype", "float32, float16 or bfloat16", "%R"), name);
    return 0;
}

#endif
