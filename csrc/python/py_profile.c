/* vaemem._core.Profile: one file of recorded answers of cuDNN. vaemem/prediction/profiles.py reads the files. */
#include "py_profile.h"

typedef struct Profile {
    PyObject_HEAD
    vm_profile *profile;
    PyObject *otherwise; /* another Profile, or None */
} Profile;

/* ---- reading data of files ---- */

static int bad(const char *what, PyObject *got) {
    if (!PyErr_Occurred()) vm_py_refuse(PyExc_ValueError, VM_EXPECTED("profile", "%s", "%R"), what, got);
    return -1;
}

static int to_number(PyObject *object, uint64_t *out) {
    *out = PyLong_Check(object) ? PyLong_AsUnsignedLongLong(object) : UINT64_MAX;
    if (PyErr_Occurred()) PyErr_Clear(), *out = UINT64_MAX;
    return *out >> 62 ? bad("integers from 0 to 2^62", object) : 0;
}

/* list: numbers and a text; no Python code runs unless it fails. */
static int to_formula(PyObject *list, vm_formula *out) {
    *out = (vm_formula){0};
    if (!PyList_Check(list) || PyList_Size(list) != 5 || !PyUnicode_Check(PyList_GetItem(list, 0)))
        return bad("formulas of tensors and four integers", list);
    const char *text = PyUnicode_AsUTF8AndSize(PyList_GetItem(list, 0), NULL);
    while (text && *text) { /* i+f+3o */
        uint32_t times = *text >= '0' && *text <= '9' ? 0 : 1;
        while (*text >= '0' && *text <= '9' && times < 1000) times = 10 * times + (uint32_t)(*text++ - '0');
        const char *at = *text ? strchr(VM_SIZE_NAMES, *text) : NULL;
        const ptrdiff_t tensor = at ? at - VM_SIZE_NAMES : VM_TENSORS;
        if (tensor >= VM_TENSORS || (text[1] && text[1] != '+')) return bad("a sum of i, o, f, I, O and F", list);
        out->times[tensor] += times;
        text += text[1] ? 2 : 1;
    }
    uint64_t part[3];
    for (int i = 0; text && i < 3; i++)
        if (to_number(PyList_GetItem(list, i + 1), &part[i])) return -1;
    PyObject *constant = PyList_GetItem(list, 4);
    out->index = (int64_t)part[0];
    out->tile = (int64_t)part[1];
    out->per_tile = (int64_t)part[2];
    out->constant = PyLong_Check(constant) ? PyLong_AsLongLong(constant) : 0;
    return !text || !PyLong_Check(constant) || PyErr_Occurred() ? bad("a formula of integers", list) : 0;
}

/* Returns: dict[name], borrowed, or NULL. */
static PyObject *item(PyObject *dict, const char *name) { return PyDict_GetItemString(dict, name); }

static int to_extent(PyObject *dict, const char *name, int64_t *out) {
    uint64_t n = 0;
    PyObject *value = item(dict, name);
    if (value && to_number(value, &n)) return -1;
    *out = (int64_t)n;
    return 0;
}

/* Reads two integers from a list or tuple. */
static int to_pair(PyObject *object, int64_t out[2]) {
    PyObject *pair = PySequence_Tuple(object);
    uint64_t n[2] = {0, 0};
    int failed = !pair || PyTuple_Size(pair) != 2 ? bad("pairs of integers", object) : 0;
    for (int i = 0; !failed && i < 2; i++) failed = to_number(PyTuple_GetItem(pair, i), &n[i]);
    out[0] = (int64_t)n[0];
    out[1] = (int64_t)n[1];
    Py_XDECREF(pair);
    return failed;
}

/* Returns: a tuple of a list's items, unaffected if Python code changes the list meanwhile. */
static PyObject *items_of(const char *what, PyObject *list, PyObject *rule) {
    if (list && PyList_Check(list)) return PyList_AsTuple(list);
    bad(what, rule);
    return NULL;
}

static int to_dtypes(PyObject *dict, vm_rule *rule) {
    PyObject *dtypes = items_of("a rule with a list of dtypes", item(dict, "dtypes"), dict);
    int failed = dtypes ? 0 : -1;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_Size(dtypes); i++) {
        vm_dtype dtype;
        failed = vm_py_to_dtype(PyTuple_GetItem(dtypes, i), &dtype) ? 0 : -1;
        if (!failed) rule->dtypes |= 1u << dtype;
    }
    Py_XDECREF(dtypes);
    return failed;
}

static int to_channels(PyObject *dict, vm_rule *rule) {
    if (!item(dict, "channels")) return 0;
    PyObject *pairs = items_of("a rule with a list of channels", item(dict, "channels"), dict);
    int failed = pairs ? 0 : -1;
    if (!failed && PyTuple_Size(pairs) > VM_RULE_PAIRS) failed = bad("a rule with at most 16 pairs of channels", dict);
    if (!failed) rule->pairs = (size_t)PyTuple_Size(pairs);
    for (size_t i = 0; !failed && i < rule->pairs; i++)
        failed = to_pair(PyTuple_GetItem(pairs, (Py_ssize_t)i), rule->channels[i]);
    Py_XDECREF(pairs);
    return failed;
}

/* dict: a private copy. */
static int read_rule(PyObject *dict, bool formula, vm_rule *rule) {
    int64_t range[2] = {1, INT64_MAX};
    PyObject *pixels = item(dict, "pixels");
    if (to_dtypes(dict, rule) || to_extent(dict, "r", &rule->r) || to_extent(dict, "stride", &rule->stride) ||
        (pixels && to_pair(pixels, range)))
        return -1;
    const int winograd = item(dict, "winograd") ? PyObject_IsTrue(item(dict, "winograd")) : 0;
    if (winograd < 0) return -1;
    rule->winograd = winograd;
    rule->least = range[0];
    rule->most = range[1];
    if (formula && (!item(dict, "formula") || to_formula(item(dict, "formula"), &rule->formula)))
        return bad("a rule with a formula", dict);
    return to_channels(dict, rule);
}

/* Reads a copy: items and keys may run Python code, which may change the dict. */
int vm_py_to_rule(PyObject *dict, bool formula, vm_rule *rule) {
    *rule = (vm_rule){.most = INT64_MAX};
    if (!PyDict_Check(dict)) return bad("rules that are dicts", dict);
    PyObject *copy = PyDict_Copy(dict);
    const int failed = copy ? read_rule(copy, formula, rule) : -1;
    Py_XDECREF(copy);
    return failed;
}

/* ---- Profile ---- */

/* formulas and rules: tuples; trees: a list of pairs. */
static int fill(vm_profile *p, PyObject *formulas, PyObject *rules, PyObject *trees) {
    vm_status s = VM_OK;
    for (Py_ssize_t i = 0; !s && i < PyTuple_Size(formulas); i++) {
        vm_formula formula;
        PyObject *const one = PyTuple_GetItem(formulas, i);
        if (one != Py_None && to_formula(one, &formula)) return -1;
        s = vm_profile_add_formula(p, one == Py_None ? NULL : &formula);
    }
    for (Py_ssize_t i = 0; !s && i < PyTuple_Size(rules); i++) {
        vm_rule rule;
        if (vm_py_to_rule(PyTuple_GetItem(rules, i), true, &rule)) return -1;
        s = vm_profile_add_rule(p, &rule);
    }
    for (Py_ssize_t i = 0; !s && i < PyList_Size(trees); i++) {
        const char *key, *tree;
        if (!PyArg_ParseTuple(PyList_GetItem(trees, i), "ss:trees", &key, &tree)) return -1;
        s = vm_profile_add_tree(p, key, tree);
    }
    return vm_py_check(s);
}

static PyObject *profile_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"strict", "otherwise", "formulas", "rules", "trees", NULL};
    int strict;
    PyObject *otherwise, *formulas, *rules, *trees;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "pOO!O!O!:Profile", names, &strict, &otherwise, &PyList_Type,
                                     &formulas, &PyList_Type, &rules, &PyDict_Type, &trees))
        return NULL;
    if (otherwise != Py_None && !PyObject_TypeCheck(otherwise, type))
        return vm_py_refuse_type("otherwise", "a Profile", otherwise);
    Profile *self = (Profile *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->otherwise = Py_NewRef(otherwise);
    const vm_profile *other = otherwise == Py_None ? NULL : ((Profile *)otherwise)->profile;
    formulas = PyList_AsTuple(formulas);
    rules = PyList_AsTuple(rules);
    trees = PyDict_Items(trees);
    if (!formulas || !rules || !trees || vm_py_check(vm_profile_new(strict, other, &self->profile)) ||
        fill(self->profile, formulas, rules, trees))
        Py_CLEAR(self);
    Py_XDECREF(formulas);
    Py_XDECREF(rules);
    Py_XDECREF(trees);
    return (PyObject *)self;
}

static void profile_dealloc(Profile *self) {
    vm_profile_free(self->profile);
    Py_XDECREF(self->otherwise);
    vm_py_free((PyObject *)self);
}

static PyObject *profile_conv(Profile *self, PyObject *args) {
    vm_conv conv;
    int tf32;
    bool found;
    uint64_t bytes;
    vm_profile_how how;
    if (!PyArg_ParseTuple(args, "O&p:conv", vm_py_to_conv, &conv, &tf32)) return NULL;
    const vm_status s = vm_profile_conv(self->profile, &conv, tf32, &found, &bytes, &how);
    if (s) return vm_py_raise(s);
    if (!found) Py_RETURN_NONE;
    return Py_BuildValue("(Kii)", (unsigned long long)bytes, how.steps, how.rule);
}

const vm_profile *vm_py_profile(PyObject *object) {
    if (vm_py_is(object, (destructor)profile_dealloc)) return ((Profile *)object)->profile;
    return (void *)vm_py_refuse_type("", "a Profile", object);
}

/* ---- for the recorder of profiles ---- */

static PyObject *conv_sizes(PyObject *Py_UNUSED(module), PyObject *question) {
    vm_conv conv;
    uint64_t size[VM_SIZES];
    if (!vm_py_to_conv(question, &conv)) return NULL;
    const vm_status s = vm_conv_sizes(&conv, size);
    if (s) return vm_py_raise(s);
    return vm_py_numbers(size, VM_SIZES);
}

static PyObject *formula_bytes(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *list, *sizes;
    vm_formula formula;
    uint64_t size[VM_SIZES], bytes;
    if (!PyArg_ParseTuple(args, "OO!:formula_bytes", &list, &PyTuple_Type, &sizes) || to_formula(list, &formula))
        return NULL;
    if (PyTuple_Size(sizes) != VM_SIZES)
        return vm_py_refuse(PyExc_ValueError, VM_EXPECTED("sizes", "%d", ""), VM_SIZES);
    for (int i = 0; i < VM_SIZES; i++)
        if (to_number(PyTuple_GetItem(sizes, i), &size[i])) return NULL;
    const vm_status s = vm_formula_bytes(&formula, size, &bytes);
    return s ? vm_py_raise(s) : PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *im2col_bytes(PyObject *Py_UNUSED(module), PyObject *question) {
    vm_conv conv;
    uint64_t bytes;
    if (!vm_py_to_conv(question, &conv) || vm_py_check(vm_conv_columns(&conv, &bytes))) return NULL;
    return PyLong_FromUnsignedLongLong(bytes);
}

PyMethodDef vm_py_convolutions[] = {
    {"conv_sizes", conv_sizes, METH_O,
     "conv_sizes(question, /)\n--\n\nReturns the sizes in formulas and trees, in the order " VM_SIZE_NAMES "."},
    {"formula_bytes", formula_bytes, METH_VARARGS,
     "formula_bytes(formula, sizes, /)\n--\n\nReturns a formula's value for the sizes of one convolution."},
    {"im2col_bytes", im2col_bytes, METH_O,
     "im2col_bytes(question, /)\n--\n\nReturns the bytes of one image's columns in a convolution by im2col."},
    {NULL, NULL, 0, NULL}};

static PyMethodDef profile_methods[] = {
    {"conv", (PyCFunction)profile_conv, METH_VARARGS,
     "conv($self, question, tf32, /)\n--\n\nReturns (bytes, how many profiles further on, which of its rules or "
     "-1); None if none of its kind was recorded."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot profile_slots[] = {{Py_tp_new, profile_new},
                                      {Py_tp_dealloc, profile_dealloc},
                                      {Py_tp_methods, profile_methods},
                                      {Py_tp_doc, "cuDNN's recorded answers, from a file's data."},
                                      {0, NULL}};

PyType_Spec vm_py_profile_type = {"vaemem._core.Profile", sizeof(Profile), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, profile_slots};
