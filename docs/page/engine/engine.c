/* For capi.js: C's free, and a type in place of _core.Model, because the page runs no VAE. */
#include "../../../csrc/python/py.h"

/* Returns: free, as C may call it: Py_tp_free of every type. */
__attribute__((export_name("free_pointer"))) freefunc free_pointer(void) { return free; }

static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)type, (void)args, (void)kwargs;
    PyErr_SetString(PyExc_OverflowError, "the page runs no VAE");
    return NULL;
}

static PyType_Slot slots[] = {{Py_tp_new, (void *)model_new}, {0, NULL}};
PyType_Spec vm_py_model_type = {"vaemem._core.Model", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, slots};
