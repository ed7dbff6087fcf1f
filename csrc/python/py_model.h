/* What py_model.c and py_run.c share. */
#ifndef VM_PY_MODEL_H
#define VM_PY_MODEL_H

#include "py.h"

typedef struct Model {
    PyObject_HEAD
    vm_model *model;
    vm_py_lock lock;   /* runs wait for each other */
    PyObject *backend; /* the capsule that keeps model->backend alive, or None */
} Model;

extern const char vm_py_plan_doc[], vm_py_run_doc[], vm_py_run_at_doc[], vm_py_reserve_doc[], vm_py_blend_doc[];
PyObject *vm_py_plan(Model *self, PyObject *args, PyObject *kwargs);
PyObject *vm_py_run(Model *self, PyObject *args, PyObject *kwargs);
PyObject *vm_py_run_at(Model *self, PyObject *args, PyObject *kwargs);
PyObject *vm_py_reserve(Model *self, PyObject *bytes);
PyObject *vm_py_blend(Model *self, PyObject *args, PyObject *kwargs);

#endif
