/* vaemem._core.Catalogue and Workspace: cuDNN's recorded answers, and the workspaces of a card's convolutions.
 * vaemem/prediction/profiles.py and workspace.py name and show them. Both are used with the GIL held. Loading a profile
 * runs Python code, so convolutions are copied first. */
#include <limits.h>

#include "../predict/script.h"
#include "../predict/workspace/plausible.h"
#include "py_profile.h"

typedef struct Catalogue {
    PyObject_HEAD
    vm_catalogue *catalogue;
    PyObject *load;
    PyObject *profiles; /* a list that owns the loaded profiles */
} Catalogue;

typedef struct Workspace {
    PyObject_HEAD
    vm_workspace *workspace;
    PyObject *catalogue;
} Workspace;

static int append(PyObject *list, PyObject *item) {
    const int failed = !item || PyList_Append(list, item);
    Py_XDECREF(item);
    return failed;
}

/* ---- reading arguments ---- */

static int check_tuple(const char *what, PyObject *object) {
    if (PyTuple_Check(object)) return 0;
    vm_py_refuse(PyExc_TypeError, VM_EXPECTED("%s", "a tuple", "%R"), what, object);
    return -1;
}

/* (key, compute capability, multiprocessors) */
static int to_card(PyObject *object, vm_card *out) {
    const char *key;
    *out = (vm_card){0};
    if (check_tuple("card", object) || !PyArg_ParseTuple(object, "sii:card", &key, &out->sm, &out->multiprocessors))
        return -1;
    if (strlen(key) >= VM_CARD_KEY || out->multiprocessors < 0) {
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("card", "a key of up to %d letters", "%R"), VM_CARD_KEY - 1, object);
        return -1;
    }
    memcpy(out->key, key, strlen(key));
    return 0;
}

/* (dict, version that answers or 0, valid from version and before version or 0, compute capabilities, standing) */
static int to_card_rule(PyObject *object, vm_card_rule *out) {
    PyObject *dict, *capabilities;
    static const char *const names[VM_STANDINGS] = {"taken", "possible", "measured"};
    const char *standing;
    *out = (vm_card_rule){0};
    if (check_tuple("rule", object) || !PyArg_ParseTuple(object, "OiiiO!s:rule", &dict, &out->as, &out->since,
                                                         &out->before, &PyTuple_Type, &capabilities, &standing))
        return -1;
    while (out->standing < VM_STANDINGS && strcmp(names[out->standing], standing) != 0) out->standing++;
    if (out->standing == VM_STANDINGS) {
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("standing", "taken, possible or measured", "%s"), standing);
        return -1;
    }
    if (PyTuple_Size(capabilities) > VM_RULE_CAPABILITIES) {
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("rule", "up to %d compute capabilities", "%R"), VM_RULE_CAPABILITIES,
                     object);
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(capabilities); i++) {
        const long sm = PyLong_AsLong(PyTuple_GetItem(capabilities, i));
        if (sm == -1 && PyErr_Occurred()) return -1;
        out->capability[out->capabilities++] = (int)VM_MIN(VM_MAX(sm, 0), INT32_MAX);
    }
    return vm_py_to_rule(dict, !out->as, &out->rule);
}

/* For PyArg_ParseTuple's O&: a vm_guess. */
static int to_guess(PyObject *name, void *out) {
    static const char *const names[] = {"rule", "least", "most", "columns"};
    vm_guess *guess = out;
    for (*guess = VM_GUESS_RULE; *guess <= VM_GUESS_COLUMNS; (*guess)++)
        if (PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, names[*guess])) return 1;
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED("guess", "rule, least, most or columns", "%R"), name);
    return 0;
}

/* ---- Catalogue ---- */

static vm_status load(void *context, size_t number, const vm_profile **profile, bool *inferred) {
    Catalogue *self = context;
    PyObject *pair = PyObject_CallFunction(self->load, "n", (Py_ssize_t)number), *object = NULL;
    int is;
    bool failed = !pair || check_tuple("load", pair) || !PyArg_ParseTuple(pair, "Op:load", &object, &is) ||
                  !(*profile = vm_py_profile(object)) || PyList_Append(self->profiles, object);
    if (!failed) *inferred = is;
    Py_XDECREF(pair);
    return failed ? VM_EINVAL : VM_OK;
}

/* For PyArg_ParseTuple's O&: a version of cuDNN as an int. Differences of two then fit. */
static int to_version(PyObject *object, void *out) {
    const long version = PyLong_AsLong(object);
    if (!(version == -1 && PyErr_Occurred()) && version >= 0 && version <= INT_MAX) {
        *(int *)out = (int)version;
        return 1;
    }
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED("version", "a number from 0 to %d", "%R"), INT_MAX, object);
    return 0;
}

/* (compute capability, version, its cards) */
static int add_recorded(Catalogue *self, PyObject *object) {
    int sm, version;
    PyObject *cards;
    vm_card *card = NULL;
    if (check_tuple("recorded", object) ||
        !PyArg_ParseTuple(object, "iO&O!:recorded", &sm, to_version, &version, &PyTuple_Type, &cards))
        return -1;
    const size_t count = (size_t)PyTuple_Size(cards);
    int failed = count ? vm_py_check(vm_scratch_new(count, sizeof *card, &card)) : 0;
    for (size_t i = 0; !failed && i < count; i++) failed = to_card(PyTuple_GetItem(cards, (Py_ssize_t)i), &card[i]);
    failed = failed || vm_py_check(vm_catalogue_add(self->catalogue, sm, version, card, count));
    vm_scratch_free(card);
    return failed ? -1 : 0;
}

static int add_rule(Catalogue *self, PyObject *object) {
    vm_card_rule rule;
    return to_card_rule(object, &rule) || vm_py_check(vm_catalogue_add_rule(self->catalogue, &rule));
}

static int add_sample(Catalogue *self, PyObject *object) {
    vm_card card;
    return to_card(object, &card) || vm_py_check(vm_catalogue_add_sample(self->catalogue, &card));
}

static int add_all(Catalogue *self, PyObject *tuple, int (*add)(Catalogue *, PyObject *)) {
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_Size(tuple); i++) failed = add(self, PyTuple_GetItem(tuple, i));
    return failed;
}

static PyObject *catalogue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"recorded", "rules", "samples", "load", NULL};
    PyObject *recorded, *rules, *samples, *loader;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O:Catalogue", names, &PyTuple_Type, &recorded, &PyTuple_Type,
                                     &rules, &PyTuple_Type, &samples, &loader))
        return NULL;
    Catalogue *self = (Catalogue *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->load = Py_NewRef(loader);
    if (!(self->profiles = PyList_New(0)) || vm_py_check(vm_catalogue_new(load, self, &self->catalogue)) ||
        add_all(self, recorded, add_recorded) || add_all(self, rules, add_rule) || add_all(self, samples, add_sample))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void catalogue_dealloc(Catalogue *self) {
    vm_catalogue_free(self->catalogue);
    Py_XDECREF(self->load);
    Py_XDECREF(self->profiles);
    vm_py_free((PyObject *)self);
}

static PyObject *to_list(vm_profile_list *profiles) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < profiles->count; i++)
        if (append(list, PyLong_FromUnsignedLong(profiles->number[i]))) Py_CLEAR(list);
    vm_scratch_free(profiles->number);
    return list;
}

static PyObject *catalogue_near(Catalogue *self, PyObject *args) {
    PyObject *object;
    vm_card card;
    int version;
    vm_profile_list found;
    if (!PyArg_ParseTuple(args, "OO&:near", &object, to_version, &version) || to_card(object, &card) ||
        vm_py_check(vm_catalogue_near(self->catalogue, &card, version, &found)))
        return NULL;
    return to_list(&found);
}

static PyObject *catalogue_nearest(Catalogue *self, PyObject *args) {
    PyObject *object;
    vm_card card;
    int version, number;
    if (!PyArg_ParseTuple(args, "OO&:nearest", &object, to_version, &version) || to_card(object, &card) ||
        vm_py_check(vm_catalogue_nearest(self->catalogue, &card, version, &number)))
        return NULL;
    return PyLong_FromLong(number);
}

static PyObject *catalogue_relatives(Catalogue *self, PyObject *args) {
    int sm, version;
    vm_profile_list found;
    if (!PyArg_ParseTuple(args, "iO&:relatives", &sm, to_version, &version) ||
        vm_py_check(vm_catalogue_relatives(self->catalogue, sm, version, &found)))
        return NULL;
    return to_list(&found);
}

/* ---- Workspace ---- */

static PyObject *workspace_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"catalogue", "card",   "rules",  "coarse", "cudnn", "shipped",
                            "release",   "is_290", "is_off", "tf32",   "guess", NULL};
    PyObject *catalogue, *card, *rules;
    vm_workspace_for of = {0};
    vm_card_rule *rule = NULL;
    int coarse, is_290, is_off, tf32;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!piiipppO&:Workspace", names, &catalogue, &card, &PyTuple_Type,
                                     &rules, &coarse, &of.torch.cudnn, &of.shipped, &of.torch.release, &is_290, &is_off,
                                     &tf32, to_guess, &of.guess) ||
        to_card(card, &of.card))
        return NULL;
    if (!vm_py_is(catalogue, (destructor)catalogue_dealloc))
        return vm_py_refuse_type("catalogue", "a Catalogue", catalogue);
    of.coarse = coarse;
    of.torch.is_290 = is_290;
    of.torch.is_off = is_off;
    of.tf32 = tf32;
    const size_t count = (size_t)PyTuple_Size(rules);
    int failed = count ? vm_py_check(vm_scratch_new(count, sizeof *rule, &rule)) : 0;
    for (size_t i = 0; !failed && i < count; i++)
        failed = to_card_rule(PyTuple_GetItem(rules, (Py_ssize_t)i), &rule[i]);
    Workspace *self = failed ? NULL : (Workspace *)PyType_GenericAlloc(type, 0);
    if (self) {
        self->catalogue = Py_NewRef(catalogue);
        if (vm_py_check(vm_workspace_new(((Catalogue *)catalogue)->catalogue, &of, rule, count, &self->workspace)))
            Py_CLEAR(self);
    }
    vm_scratch_free(rule);
    return (PyObject *)self;
}

static void workspace_dealloc(Workspace *self) {
    vm_workspace_free(self->workspace);
    Py_XDECREF(self->catalogue);
    vm_py_free((PyObject *)self);
}

static PyObject *workspace_conv(Workspace *self, PyObject *question) {
    vm_conv conv;
    vm_known known;
    if (!vm_py_to_conv(question, &conv) ||
        vm_py_check(vm_lookup_conv(vm_workspace_lookup(self->workspace), &conv, &known)))
        return NULL;
    return Py_BuildValue("(KI)", (unsigned long long)known.bytes, (unsigned)known.source);
}

/* A copy of the convolutions of a Trace, a Script or a Workspace. */
static int copy_convs(PyObject *of, vm_conv **out, size_t *count) {
    const vm_known *known = NULL;
    const vm_conv *conv = NULL;
    const vm_script *const script = vm_py_script(of);
    if (vm_py_is(of, (destructor)workspace_dealloc)) {
        known = vm_lookup_known(vm_workspace_lookup(((Workspace *)of)->workspace), count);
    } else if (script) {
        conv = script->conv, *count = script->convs;
    } else {
        const vm_trace *const t = vm_py_trace(of);
        if (!t) return -1;
        conv = t->conv, *count = t->convs;
    }
    if (vm_py_check(vm_scratch_new(*count, sizeof **out, out))) return -1;
    for (size_t i = 0; i < *count; i++) (*out)[i] = known ? known[i].conv : conv[i];
    return 0;
}

static PyObject *workspace_answers(Workspace *self, PyObject *of) {
    vm_conv *conv;
    size_t count;
    if (copy_convs(of, &conv, &count)) return NULL;
    PyObject *lists[3] = {PyList_New(0), PyList_New(0), PyList_New(0)};
    int failed = !lists[0] || !lists[1] || !lists[2];
    for (size_t i = 0; !failed && i < count; i++) {
        vm_known known;
        failed = vm_py_check(vm_lookup_conv(vm_workspace_lookup(self->workspace), &conv[i], &known));
        failed = failed || append(lists[0], PyLong_FromUnsignedLongLong(known.bytes)) ||
                 append(lists[1], PyLong_FromUnsignedLongLong(known.next)) ||
                 append(lists[2], PyLong_FromUnsignedLong(known.source));
    }
    PyObject *result = failed ? NULL : Py_BuildValue("OOO", lists[0], lists[1], lists[2]);
    for (int i = 0; i < 3; i++) Py_XDECREF(lists[i]);
    vm_scratch_free(conv);
    return result;
}

static PyObject *workspace_rows(Workspace *self, PyObject *args) {
    PyObject *of;
    vm_conv *conv;
    uint64_t *row;
    size_t convs, count;
    int every;
    if (!PyArg_ParseTuple(args, "pO:rows", &every, &of) || copy_convs(of, &conv, &convs)) return NULL;
    const int failed = vm_py_check(vm_workspace_rows(self->workspace, every, conv, convs, &row, &count));
    vm_scratch_free(conv);
    if (failed) return NULL;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < count; i++)
        if (append(list, vm_py_numbers(row + i * convs, convs))) Py_CLEAR(list);
    vm_scratch_free(row);
    return list;
}

static PyObject *workspace_known(Workspace *self, PyObject *args) {
    int own;
    if (!PyArg_ParseTuple(args, "p:known", &own)) return NULL;
    PyObject *list = PyList_New(0);
    vm_lookup *const lookup = vm_workspace_lookup(self->workspace);
    size_t count;
    vm_lookup_known(lookup, &count);
    for (size_t i = 0; list && i < count; i++) {
        const vm_known one = vm_lookup_known(lookup, &count)[i];
        if ((!own || one.own) && append(list, vm_py_from_conv(&one.conv))) Py_CLEAR(list);
    }
    return list;
}

static PyObject *workspace_sources(Workspace *self, PyObject *args) {
    Py_ssize_t first;
    size_t count;
    vm_lookup *const lookup = vm_workspace_lookup(self->workspace);
    if (!PyArg_ParseTuple(args, "n:sources", &first)) return NULL;
    PyObject *list = PyList_New(0);
    vm_lookup_sources(lookup, &count);
    for (size_t i = (size_t)VM_MAX(first, 0); list && i < count; i++) {
        const vm_source s = vm_lookup_sources(lookup, &count)[i];
        vm_workspace_entry entry = {-1, -1};
        if (s.entry >= 0) entry = vm_workspace_entry_at(self->workspace, (size_t)s.entry);
        PyObject *one = Py_BuildValue("(iiiiizi)", (int)s.own, entry.rule, entry.recorded, s.how.steps, s.how.rule,
                                      s.why, (int)s.form);
        if (append(list, one)) Py_CLEAR(list);
    }
    return list;
}

/* ---- types ---- */

static PyMethodDef catalogue_methods[] = {
    {"near", (PyCFunction)catalogue_near, METH_VARARGS,
     "near($self, card, version, /)\n--\n\nReturns the numbers of the profiles for a card (key, compute "
     "capability, multiprocessors), the nearest version first (0: the newest first)."},
    {"nearest", (PyCFunction)catalogue_nearest, METH_VARARGS,
     "nearest($self, card, version, /)\n--\n\nReturns the number of the first of near that may answer for the "
     "version, or -1."},
    {"relatives", (PyCFunction)catalogue_relatives, METH_VARARGS,
     "relatives($self, sm, version, /)\n--\n\nReturns the numbers of the profiles that bound the answers of a "
     "version (0: any)."},
    {NULL, NULL, 0, NULL}};

static PyMethodDef workspace_methods[] = {
    {"conv", (PyCFunction)workspace_conv, METH_O,
     "conv($self, question, /)\n--\n\nReturns (bytes, number of the source) of a convolution."},
    {"answers", (PyCFunction)workspace_answers, METH_O,
     "answers($self, of, /)\n--\n\nReturns three lists for the convolutions of a Trace, a Script or another "
     "Workspace: bytes, bytes of the next plan, and numbers of the sources."},
    {"rows", (PyCFunction)workspace_rows, METH_VARARGS,
     "rows($self, every, of, /)\n--\n\nReturns every other plausible tuple of bytes for the same convolutions. "
     "every: if no version is known."},
    {"known", (PyCFunction)workspace_known, METH_VARARGS,
     "known($self, own, /)\n--\n\nReturns the convolutions so far. own: only those that PyTorch runs itself."},
    {"sources", (PyCFunction)workspace_sources, METH_VARARGS,
     "sources($self, first, /)\n--\n\nReturns the sources so far, from number `first` on: (why PyTorch runs it "
     "itself or 0, number of the rule or -1, of the recorded profile or -1, how many profiles further on, which "
     "of its rules or -1, a guess in words or None, the convolution's form: 0 plain in NCHW, 1 plain in NHWC, 2 "
     "any other)."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot catalogue_slots[] = {{Py_tp_new, catalogue_new},
                                        {Py_tp_dealloc, catalogue_dealloc},
                                        {Py_tp_methods, catalogue_methods},
                                        {Py_tp_doc, "cuDNN's recorded answers. Profiles are loaded when needed."},
                                        {0, NULL}};

static PyType_Slot workspace_slots[] = {{Py_tp_new, workspace_new},
                                        {Py_tp_dealloc, workspace_dealloc},
                                        {Py_tp_methods, workspace_methods},
                                        {Py_tp_doc, "Workspaces of PyTorch's convolutions on a card."},
                                        {0, NULL}};

PyType_Spec vm_py_catalogue_type = {"vaemem._core.Catalogue", sizeof(Catalogue), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, catalogue_slots};
PyType_Spec vm_py_workspace_type = {"vaemem._core.Workspace", sizeof(Workspace), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, workspace_slots};
