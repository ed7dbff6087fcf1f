/* The part of NumPy's C API that csrc/python uses; see ../Python.h. */
#ifndef VM_PAGE_ARRAYOBJECT_H
#define VM_PAGE_ARRAYOBJECT_H

typedef PyObject PyArrayObject;
typedef struct PyArray_Descr {
    PyObject_HEAD
    int type_num;
    PyTypeObject *typeobj;
} PyArray_Descr;
typedef ssize_t npy_intp;
enum { NPY_UINT64, NPY_FLOAT, NPY_HALF, NPY_UINT8 };

void *PyArray_DATA(PyArrayObject *);
PyArray_Descr *PyArray_DESCR(PyArrayObject *);
npy_intp PyArray_DIM(PyArrayObject *, int);
int PyArray_NDIM(PyArrayObject *);
PyObject *PyArray_SimpleNew(int, const npy_intp *, int);
int PyArray_IS_C_CONTIGUOUS(PyArrayObject *);
int PyArray_ISNOTSWAPPED(PyArrayObject *);
int PyArray_ISALIGNED(PyArrayObject *);
int PyDataType_ELSIZE(PyArray_Descr *);
#define PyArray_ImportNumPyAPI() 0

#endif
