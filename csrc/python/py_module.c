/* vaemem._core: multi-phase initialisation, and functions that belong to no type. */
#include "py.h"

static PyObject *models(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    PyObject *all = PyDict_New();
    for (const vm_arch *const *a = vm_arch_models(); all && *a; a++) {
        PyObject *dict = vm_py_arch_to_dict(*a);
        if (!dict || PyDict_SetItemString(all, (*a)->name, dict)) Py_CLEAR(all);
        Py_XDECREF(dict);
    }
    return all;
}

static PyObject *backends(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"dtype", "precision", NULL};
    vm_dtype dtype = VM_F32;
    vm_precision precision = VM_HIGHEST;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&O&", names, vm_py_to_dtype, &dtype, vm_py_to_precision,
                                     &precision))
        return NULL;
    PyObject *list = PyList_New(0);
    const vm_backend *b;
    for (size_t i = 0; list && (b = vm_backend_at(dtype, precision, i)); i++) {
        PyObject *row = Py_BuildValue("(sN)", b->name, PyBool_FromLong(b->usable()));
        if (!row || PyList_Append(list, row)) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *disable(PyObject *Py_UNUSED(module), PyObject *names) {
    const char *text = PyUnicode_AsUTF8AndSize(names, NULL);
    if (!text) return NULL;
    vm_cpu_disable(text);
    Py_RETURN_NONE;
}

static PyObject *fail_alloc_at(PyObject *Py_UNUSED(module), PyObject *nth) {
    size_t n = PyLong_AsSize_t(nth);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromSize_t(vm_mem_fail_at(n));
}

static PyMethodDef functions[] = {
    {"models", models, METH_NOARGS, "models()\n--\n\nReturns the shipped architectures: {name: arch dict}."},
    {"backends", VM_PY_KEYWORDS(backends), METH_VARARGS | METH_KEYWORDS,
     "backends(dtype='float32', precision='highest')\n--\n\nReturns [(name, usable)] on the CPU for such numbers, "
     "best first."},
    {"disable", disable, METH_O, "disable(names)\n--\n\nDisables backends (comma-separated names)."},
    {"fail_alloc_at", fail_alloc_at, METH_O,
     "fail_alloc_at(n)\n--\n\nFor tests: the nth allocation of the core from now fails; 0 turns it off. Returns "
     "how many were still to go."},
    {NULL, NULL, 0, NULL}};

static int exec_module(PyObject *module) {
    PyType_Spec *const types[] = {&vm_py_model_type,   &vm_py_trace_type,     &vm_py_script_type,
                                  &vm_py_play_type,    &vm_py_column_type,    &vm_py_program_type,
                                  &vm_py_profile_type, &vm_py_catalogue_type, &vm_py_workspace_type};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (vm_py_add_type(module, types[i])) return -1;
    return PyModule_AddFunctions(module, vm_py_unpickle) || PyModule_AddFunctions(module, vm_py_convolutions) ||
                   PyModule_AddFunctions(module, vm_py_judges) || vm_py_add_allocator(module)
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)exec_module},
#ifdef Py_mod_multiple_interpreters
                                   {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
                                   {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "vaemem._core",
                                        .m_doc = "The C core of vaemem.", .m_methods = functions, .m_slots = slots};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
