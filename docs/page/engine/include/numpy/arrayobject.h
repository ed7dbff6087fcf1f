/* The part of NumPy's C API that the page's bindings use: one array of numbers of 8 bytes (capi.js). */
#ifndef VM_PAGE_ARRAYOBJECT_H
#define VM_PAGE_ARRAYOBJECT_H

typedef PyObject PyArrayObject;
typedef Py_ssize_t npy_intp;
enum { NPY_UINT64 };

void *PyArray_DATA(PyArrayObject *);
PyObject *PyArray_SimpleNew(int, const npy_intp *, int);
#define PyArray_ImportNumPyAPI() 0

#endif
