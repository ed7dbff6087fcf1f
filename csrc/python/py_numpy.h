/* NumPy's C API, for the one file of an extension that takes or makes arrays. */
#ifndef VM_PY_NUMPY_H
#define VM_PY_NUMPY_H

#include "py_shared.h"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION /* runs with NumPy 1.26 too */
#include <numpy/arrayobject.h>

#endif
