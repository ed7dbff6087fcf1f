/* vaemem._core.Profile and Lookup: recorded workspaces of convolutions. vaemem/prediction/profiles.py and
 * workspace.py are their faces. Both are used with the GIL held, and no pointer into them is kept while Python code
 * may run. */
#include "../predict/lookup.h"
#include "../predict/torch_trace.h"
#include "py.h"

typedef struct Profile {
    PyObject_HEAD
    vm_profile *profile;
    PyObject *otherwise; /* another Profile, or None */
} Profile;

typedef struct Lookup {
    PyObject_HEAD
    vm_lookup *lookup;
    PyObject *profiles; /* a tuple that keeps them */
    bool tf32;
} Lookup;

/* ---- reading files' data ---- */

static int bad(const char *what, PyObject *got) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "profile: want %s, got %R", what, got);
    return -1;
}

static int check(vm_status s) {
    if (s) vm_py_raise(s);
    return s ? -1 : 0;
}

static int to_number(PyObject *object, uint64_t *out) {
    *out = PyLong_Check(object) ? PyLong_AsUnsignedLongLong(object) : UINT64_MAX;
    if (PyErr_Occurred()) PyErr_Clear(), *out = UINT64_MAX;
    return *out >> 62 ? bad("integers from 0 to 2^62", object) : 0;
}

/* Of numbers and a text alone: it runs none of Python's code until it fails. */
static int to_formula(PyObject *list, vm_formula *out) {
    *out = (vm_formula){0};
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != 5 || !PyUnicode_Check(PyList_GET_ITEM(list, 0)))
        return bad("formulas of tensors and four integers", list);
    const char *text = PyUnicode_AsUTF8(PyList_GET_ITEM(list, 0));
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
        if (to_number(PyList_GET_ITEM(list, i + 1), &part[i])) return -1;
    PyObject *constant = PyList_GET_ITEM(list, 4);
    out->index = (int64_t)part[0];
    out->tile = (int64_t)part[1];
    out->per_tile = (int64_t)part[2];
    out->constant = PyLong_Check(constant) ? PyLong_AsLongLong(constant) : 0;
    return !text || !PyLong_Check(constant) || PyErr_Occurred() ? bad("a formula of integers", list) : 0;
}

/* dict[name], borrowed: NULL where it is not there. */
static PyObject *item(PyObject *dict, const char *name) { return PyDict_GetItemString(dict, name); }

static int to_extent(PyObject *dict, const char *name, int64_t *out) {
    uint64_t n = 0;
    PyObject *value = item(dict, name);
    if (value && to_number(value, &n)) return -1;
    *out = (int64_t)n;
    return 0;
}

/* Two integers of a list or tuple. */
static int to_pair(PyObject *object, int64_t out[2]) {
    PyObject *pair = PySequence_Tuple(object);
    uint64_t n[2] = {0, 0};
    int failed = !pair || PyTuple_GET_SIZE(pair) != 2 ? bad("pairs of integers", object) : 0;
    for (int i = 0; !failed && i < 2; i++) failed = to_number(PyTuple_GET_ITEM(pair, i), &n[i]);
    out[0] = (int64_t)n[0];
    out[1] = (int64_t)n[1];
    Py_XDECREF(pair);
    return failed;
}

/* A tuple of a list's items, which stays as it is whatever Python's code does to the list meanwhile. */
static PyObject *items_of(const char *what, PyObject *list, PyObject *rule) {
    if (list && PyList_Check(list)) return PyList_AsTuple(list);
    bad(what, rule);
    return NULL;
}

static int to_dtypes(PyObject *dict, vm_rule *rule) {
    PyObject *dtypes = items_of("a rule with a list of dtypes", item(dict, "dtypes"), dict);
    int failed = dtypes ? 0 : -1;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(dtypes); i++) {
        vm_dtype dtype;
        failed = vm_py_to_dtype(PyTuple_GET_ITEM(dtypes, i), &dtype) ? 0 : -1;
        if (!failed) rule->dtypes |= 1u << dtype;
    }
    Py_XDECREF(dtypes);
    return failed;
}

static int to_channels(PyObject *dict, vm_rule *rule) {
    if (!item(dict, "channels")) return 0;
    PyObject *pairs = items_of("a rule with a list of channels", item(dict, "channels"), dict);
    int failed = pairs ? 0 : -1;
    if (!failed && PyTuple_GET_SIZE(pairs) > VM_RULE_PAIRS)
        failed = bad("a rule with at most 16 pairs of channels", dict);
    if (!failed) rule->pairs = (size_t)PyTuple_GET_SIZE(pairs);
    for (size_t i = 0; !failed && i < rule->pairs; i++)
        failed = to_pair(PyTuple_GET_ITEM(pairs, (Py_ssize_t)i), rule->channels[i]);
    Py_XDECREF(pairs);
    return failed;
}

/* A dict that nobody else sees. */
static int read_rule(PyObject *dict, bool formula, vm_rule *rule) {
    int64_t range[2] = {1, INT64_MAX};
    PyObject *pixels = item(dict, "pixels");
    if (to_dtypes(dict, rule) || to_extent(dict, "r", &rule->r) || to_extent(dict, "stride", &rule->stride) ||
        (pixels && to_pair(pixels, range)))
        return -1;
    rule->least = range[0];
    rule->most = range[1];
    if (formula && (!item(dict, "formula") || to_formula(item(dict, "formula"), &rule->formula)))
        return bad("a rule with a formula", dict);
    return to_channels(dict, rule);
}

/* formula: whether the rule has to have one. Items and keys may run Python's code, which may change the dict: what is
 * read is a copy. */
static int to_rule(PyObject *dict, bool formula, vm_rule *rule) {
    *rule = (vm_rule){.most = INT64_MAX};
    if (!PyDict_Check(dict)) return bad("rules that are dicts", dict);
    PyObject *copy = PyDict_Copy(dict);
    const int failed = copy ? read_rule(copy, formula, rule) : -1;
    Py_XDECREF(copy);
    return failed;
}

/* ---- Profile ---- */

/* formulas and rules: tuples. No Python code runs while the dict is read. */
static int fill(vm_profile *p, PyObject *formulas, PyObject *rules, PyObject *trees) {
    PyObject *key, *tree;
    Py_ssize_t at = 0;
    vm_status s = VM_OK;
    for (Py_ssize_t i = 0; !s && i < PyTuple_GET_SIZE(formulas); i++) {
        vm_formula formula;
        PyObject *const one = PyTuple_GET_ITEM(formulas, i);
        if (one != Py_None && to_formula(one, &formula)) return -1;
        s = vm_profile_add_formula(p, one == Py_None ? NULL : &formula);
    }
    for (Py_ssize_t i = 0; !s && i < PyTuple_GET_SIZE(rules); i++) {
        vm_rule rule;
        if (to_rule(PyTuple_GET_ITEM(rules, i), true, &rule)) return -1;
        s = vm_profile_add_rule(p, &rule);
    }
    while (!s && PyDict_Next(trees, &at, &key, &tree)) {
        const char *key_text, *tree_text;
        if (!PyArg_Parse(key, "s", &key_text) || !PyArg_Parse(tree, "s", &tree_text)) return -1;
        s = vm_profile_add_tree(p, key_text, tree_text);
    }
    return check(s);
}

static PyObject *profile_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"strict", "otherwise", "formulas", "rules", "trees", NULL};
    int strict;
    PyObject *otherwise, *formulas, *rules, *trees;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "pOO!O!O!:Profile", names, &strict, &otherwise, &PyList_Type,
                                     &formulas, &PyList_Type, &rules, &PyDict_Type, &trees))
        return NULL;
    if (otherwise != Py_None && !PyObject_TypeCheck(otherwise, type))
        return PyErr_Format(PyExc_TypeError, "otherwise: want a Profile, got %s", Py_TYPE(otherwise)->tp_name);
    Profile *self = (Profile *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->otherwise = Py_NewRef(otherwise);
    const vm_profile *other = otherwise == Py_None ? NULL : ((Profile *)otherwise)->profile;
    formulas = PyList_AsTuple(formulas);
    rules = PyList_AsTuple(rules);
    if (!formulas || !rules || check(vm_profile_new(strict, other, &self->profile)) ||
        fill(self->profile, formulas, rules, trees))
        Py_CLEAR(self);
    Py_XDECREF(formulas);
    Py_XDECREF(rules);
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

/* ---- Lookup ---- */

static bool is_profile(PyObject *object) {
    const bool is = Py_TYPE(object)->tp_dealloc == (destructor)profile_dealloc;
    if (!is) PyErr_Format(PyExc_TypeError, "entries: want Profiles, got %s", Py_TYPE(object)->tp_name);
    return is;
}

/* Adds (rule or None, Profile or None). */
static int add_entry(Lookup *self, PyObject *pair, Py_ssize_t i) {
    PyObject *rule, *profile;
    vm_rule read;
    if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "OO", &rule, &profile)) return bad("pairs", pair);
    const bool has_rule = rule != Py_None, has_profile = profile != Py_None;
    if (has_profile && !is_profile(profile)) return -1;
    if (has_rule && to_rule(rule, !has_profile, &read)) return -1;
    if (!has_rule && !has_profile) return bad("a rule or a profile", pair);
    PyTuple_SET_ITEM(self->profiles, i, Py_NewRef(profile));
    return check(
        vm_lookup_add(self->lookup, has_rule ? &read : NULL, has_profile ? ((Profile *)profile)->profile : NULL));
}

/* For PyArg_ParseTuple's O&: a vm_guess. */
static int to_guess(PyObject *name, void *out) {
    static const char *const names[] = {"rule", "least", "most", "columns"};
    vm_guess *guess = out;
    for (*guess = VM_GUESS_RULE; *guess <= VM_GUESS_COLUMNS; (*guess)++)
        if (PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, names[*guess])) return 1;
    PyErr_Format(PyExc_ValueError, "guess: want rule, least, most or columns, got %R", name);
    return 0;
}

static PyObject *lookup_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"sm", "cudnn", "guessed", "release", "is_290", "tf32", "guess", "entries", NULL};
    vm_lookup_torch torch = {0};
    vm_guess guess;
    int is_290, tf32;
    PyObject *entries, *list;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiiippO&O:Lookup", names, &torch.sm, &torch.cudnn, &torch.guessed,
                                     &torch.release, &is_290, &tf32, to_guess, &guess, &entries) ||
        !(list = PySequence_Tuple(entries)))
        return NULL;
    torch.is_290 = is_290;
    Lookup *self = (Lookup *)type->tp_alloc(type, 0);
    if (self) self->tf32 = tf32;
    const Py_ssize_t count = PyTuple_GET_SIZE(list);
    int failed =
        !self || !(self->profiles = PyTuple_New(count)) || check(vm_lookup_new(&torch, tf32, guess, &self->lookup));
    for (Py_ssize_t i = 0; !failed && i < count; i++) failed = add_entry(self, PyTuple_GET_ITEM(list, i), i);
    Py_DECREF(list);
    if (failed) Py_CLEAR(self);
    return (PyObject *)self;
}

static void lookup_dealloc(Lookup *self) {
    vm_lookup_free(self->lookup);
    Py_XDECREF(self->profiles);
    vm_py_free((PyObject *)self);
}

static PyObject *lookup_conv(Lookup *self, PyObject *question) {
    vm_conv conv;
    vm_known known;
    if (!vm_py_to_conv(question, &conv) || check(vm_lookup_conv(self->lookup, &conv, &known))) return NULL;
    return Py_BuildValue("(KI)", (unsigned long long)known.bytes, (unsigned)known.source);
}

static int append(PyObject *list, PyObject *item) {
    const int failed = !item || PyList_Append(list, item);
    Py_XDECREF(item);
    return failed;
}

/* The i-th convolution of a Trace, a Process or a Lookup: 1, or 0 behind the last; -1 with an exception set. */
static int question_of(PyObject *of, size_t i, vm_conv *out) {
    size_t count;
    if (Py_TYPE(of)->tp_dealloc == (destructor)lookup_dealloc) {
        const vm_known *known = vm_lookup_known(((Lookup *)of)->lookup, &count);
        if (i < count) *out = known[i].conv;
        return i < count;
    }
    const vm_trace *t = vm_py_script(of);
    if (!t && !(t = vm_py_trace(of))) return -1;
    if (i < t->convs) *out = t->conv[i];
    return i < t->convs;
}

static bool is_own(const Lookup *self, const vm_known *known) {
    size_t count;
    return vm_lookup_sources(self->lookup, &count)[known->source].own != VM_OWN_NONE;
}

static PyObject *lookup_answers(Lookup *self, PyObject *args) {
    PyObject *of;
    int has_other, more = 1;
    if (!PyArg_ParseTuple(args, "Op:answers", &of, &has_other)) return NULL;
    PyObject *lists[3] = {PyList_New(0), PyList_New(0), PyList_New(0)};
    int failed = !lists[0] || !lists[1] || !lists[2];
    for (size_t i = 0; !failed; i++) {
        vm_conv conv;
        vm_known known;
        more = question_of(of, i, &conv);
        failed = more < 0 || (more && check(vm_lookup_conv(self->lookup, &conv, &known)));
        if (failed || !more) break;
        const unsigned long long next = has_other && !is_own(self, &known) ? 0 : known.bytes;
        failed = append(lists[0], PyLong_FromUnsignedLongLong(known.bytes)) ||
                 append(lists[1], PyLong_FromUnsignedLongLong(next)) ||
                 append(lists[2], PyLong_FromUnsignedLong(known.source));
    }
    PyObject *result = failed ? NULL : PyTuple_Pack(3, lists[0], lists[1], lists[2]);
    for (int i = 0; i < 3; i++) Py_XDECREF(lists[i]);
    return result;
}

/* (bytes of each convolution of `of`, how many of these were recorded) by a profile, else as `rest` knows it. */
static PyObject *by_profile(Lookup *self, PyObject *of, const vm_profile *profile, Lookup *rest) {
    PyObject *list = PyList_New(0);
    Py_ssize_t held = 0;
    int failed = !list, more = 1;
    vm_conv conv;
    while (!failed && (more = question_of(of, (size_t)PyList_GET_SIZE(list), &conv)) > 0) {
        vm_known known;
        vm_profile_how how;
        bool found;
        uint64_t bytes;
        failed = check(vm_profile_conv(profile, &conv, self->tf32, &found, &bytes, &how)) ||
                 check(vm_lookup_conv(self->lookup, &conv, &known));
        if (failed) break;
        held += found;
        if (!is_own(self, &known)) {
            if (found)
                known.bytes = bytes;
            else
                failed = check(vm_lookup_conv(rest->lookup, &conv, &known));
        }
        failed = failed || append(list, PyLong_FromUnsignedLongLong(known.bytes));
    }
    PyObject *row = failed || more < 0 ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return row ? Py_BuildValue("(Nn)", row, held) : NULL;
}

static PyObject *lookup_by_each(Lookup *self, PyObject *args) {
    PyObject *of, *profiles, *rest;
    if (!PyArg_ParseTuple(args, "OO!O!:by_each", &of, &PyTuple_Type, &profiles, Py_TYPE(self), &rest)) return NULL;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < PyTuple_GET_SIZE(profiles); i++) {
        PyObject *profile = PyTuple_GET_ITEM(profiles, i);
        if (!is_profile(profile) || append(list, by_profile(self, of, ((Profile *)profile)->profile, (Lookup *)rest)))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *lookup_known(Lookup *self, PyObject *args) {
    int own;
    if (!PyArg_ParseTuple(args, "p:known", &own)) return NULL;
    PyObject *list = PyList_New(0);
    size_t count;
    vm_lookup_known(self->lookup, &count);
    for (size_t i = 0; list && i < count; i++) {
        const vm_known one = vm_lookup_known(self->lookup, &count)[i];
        if ((!own || is_own(self, &one)) && append(list, vm_py_from_conv(&one.conv))) Py_CLEAR(list);
    }
    return list;
}

static PyObject *lookup_sources(Lookup *self, PyObject *args) {
    Py_ssize_t first;
    size_t count;
    if (!PyArg_ParseTuple(args, "n:sources", &first)) return NULL;
    PyObject *list = PyList_New(0);
    vm_lookup_sources(self->lookup, &count);
    for (size_t i = (size_t)VM_MAX(first, 0); list && i < count; i++) {
        const vm_source s = vm_lookup_sources(self->lookup, &count)[i];
        PyObject *one = Py_BuildValue("(iiiizi)", (int)s.own, s.entry, s.how.steps, s.how.rule, s.why, (int)s.form);
        if (append(list, one)) Py_CLEAR(list);
    }
    return list;
}

/* ---- for whoever records profiles ---- */

static PyObject *conv_sizes(PyObject *Py_UNUSED(module), PyObject *question) {
    vm_conv conv;
    uint64_t size[VM_SIZES];
    if (!vm_py_to_conv(question, &conv)) return NULL;
    const vm_status s = vm_conv_sizes(&conv, size);
    if (s) return vm_py_raise(s);
    PyObject *tuple = PyTuple_New(VM_SIZES);
    for (int i = 0; tuple && i < VM_SIZES; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(size[i]);
        if (number)
            PyTuple_SET_ITEM(tuple, i, number);
        else
            Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *formula_bytes(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *list, *sizes;
    vm_formula formula;
    uint64_t size[VM_SIZES], bytes;
    if (!PyArg_ParseTuple(args, "OO!:formula_bytes", &list, &PyTuple_Type, &sizes) || to_formula(list, &formula))
        return NULL;
    if (PyTuple_GET_SIZE(sizes) != VM_SIZES) return PyErr_Format(PyExc_ValueError, "sizes: want %d", VM_SIZES);
    for (int i = 0; i < VM_SIZES; i++)
        if (to_number(PyTuple_GET_ITEM(sizes, i), &size[i])) return NULL;
    const vm_status s = vm_formula_bytes(&formula, size, &bytes);
    return s ? vm_py_raise(s) : PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *im2col_bytes(PyObject *Py_UNUSED(module), PyObject *question) {
    vm_conv conv;
    uint64_t bytes;
    if (!vm_py_to_conv(question, &conv) || check(vm_conv_columns(&conv, &bytes))) return NULL;
    return PyLong_FromUnsignedLongLong(bytes);
}

PyMethodDef vm_py_lookups[] = {
    {"conv_sizes", conv_sizes, METH_O,
     "conv_sizes(question, /)\n--\n\nWhat formulas and trees speak of, in the order " VM_SIZE_NAMES "."},
    {"formula_bytes", formula_bytes, METH_VARARGS,
     "formula_bytes(formula, sizes, /)\n--\n\nA formula's value for the sizes of one convolution."},
    {"im2col_bytes", im2col_bytes, METH_O,
     "im2col_bytes(question, /)\n--\n\nBytes of one image's columns in a convolution by im2col."},
    {NULL, NULL, 0, NULL}};

static PyMethodDef profile_methods[] = {{"conv", (PyCFunction)profile_conv, METH_VARARGS,
                                         "conv($self, question, tf32, /)\n--\n\n(bytes, how many profiles further on, "
                                         "which of its rules or -1); None where "
                                         "none of its kind was recorded."},
                                        {NULL, NULL, 0, NULL}};

static PyMethodDef lookup_methods[] = {
    {"conv", (PyCFunction)lookup_conv, METH_O,
     "conv($self, question, /)\n--\n\n(bytes, number of the source) of a convolution."},
    {"answers", (PyCFunction)lookup_answers, METH_VARARGS,
     "answers($self, of, has_other, /)\n--\n\nThree lists for the convolutions of a Trace, a Process or another "
     "Lookup: "
     "bytes, bytes of the next\nplan, and numbers of the sources."},
    {"by_each", (PyCFunction)lookup_by_each, METH_VARARGS,
     "by_each($self, of, profiles, rest, /)\n--\n\nFor each of a tuple of Profiles (a tuple of the bytes of the "
     "convolutions of a Trace, a Process or\na Lookup, how many of these it has recorded). `rest`, another Lookup, "
     "says the bytes where it has not.\nWhat PyTorch runs by itself stays."},
    {"known", (PyCFunction)lookup_known, METH_VARARGS,
     "known($self, own, /)\n--\n\nThe convolutions so far; own: those that PyTorch runs itself."},
    {"sources", (PyCFunction)lookup_sources, METH_VARARGS,
     "sources($self, first, /)\n--\n\nThe sources so far, from number `first` on: (why PyTorch runs it itself or 0, "
     "which entry answered or -1,\nhow many profiles further on, which of its rules or -1, a guess in words or None, "
     "the convolution's form:\n0 plain in NCHW, 1 plain in NHWC, 2 any other)."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot profile_slots[] = {{Py_tp_new, profile_new},
                                      {Py_tp_dealloc, profile_dealloc},
                                      {Py_tp_methods, profile_methods},
                                      {Py_tp_doc, "Recorded answers of cuDNN, from a file's data."},
                                      {0, NULL}};

static PyType_Slot lookup_slots[] = {
    {Py_tp_new, lookup_new},
    {Py_tp_dealloc, lookup_dealloc},
    {Py_tp_methods, lookup_methods},
    {Py_tp_doc, "Workspaces of PyTorch's convolutions by the first of some rules and profiles that answers."},
    {0, NULL}};

PyType_Spec vm_py_profile_type = {"vaemem._core.Profile", sizeof(Profile), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, profile_slots};
PyType_Spec vm_py_lookup_type = {"vaemem._core.Lookup", sizeof(Lookup), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, lookup_slots};
