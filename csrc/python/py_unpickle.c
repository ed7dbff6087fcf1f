/* vaemem._core.read_pickle: reads a pickle of plain data (protocols 2 to 5) without the pickle machine. `named` also
 * accepts the objects in PyTorch's files: a name becomes text; a call becomes a tuple of the name and its arguments;
 * state set later is dropped; a set becomes a list or a tuple. Items without such a form are dropped. Nothing is looked
 * up, and nothing is called.
 *
 * Snapshots come from strangers. The opcodes known here build dicts, lists, tuples, integers, floats, strings, bytes,
 * bools and None; none of them can name a class or call anything. Every length is checked against the remaining bytes,
 * memo indices against the file's size, dict keys against types whose hash does not recurse. So memory stays within a
 * constant factor of the file, and no input overflows the C stack. */
#include "py.h"

typedef struct reader {
    const uint8_t *start, *at, *end;
    PyObject **stack, **memo;
    size_t *mark;
    size_t depth, stack_size, marks, mark_size, memo_size, memo_used;
    bool named;
} reader;

static int refuse(const reader *r, const char *why) {
    vm_py_refuse(PyExc_ValueError, "pickle: byte %zd: %s", (Py_ssize_t)(r->at - r->start), why);
    return -1;
}

static int grow(void *array, size_t *size, size_t needed, size_t item) {
    if (needed <= *size) return 0;
    const size_t larger = VM_MAX(2 * *size, VM_MAX(needed, 64));
    void **p = array, *grown = PyMem_Realloc(*p, larger * item);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    memset((char *)grown + *size * item, 0, (larger - *size) * item);
    *p = grown;
    *size = larger;
    return 0;
}

/* Pushes an object; steals the reference. */
static int push(reader *r, PyObject *object) {
    if (!object) return -1;
    if (grow(&r->stack, &r->stack_size, r->depth + 1, sizeof *r->stack)) {
        Py_DECREF(object);
        return -1;
    }
    r->stack[r->depth++] = object;
    return 0;
}

/* Returns: how many objects lie above the last mark. */
static size_t above_mark(const reader *r) { return r->depth - (r->marks ? r->mark[r->marks - 1] : 0); }

/* Returns: the next n bytes; NULL with an exception set if the file is too short. */
static const uint8_t *bytes(reader *r, uint64_t n) {
    if (n > (uint64_t)(r->end - r->at)) {
        refuse(r, "the file ends in the middle of an item");
        return NULL;
    }
    const uint8_t *p = r->at;
    r->at += n;
    return p;
}

/* Reads a little-endian number of n bytes. */
static int number(reader *r, int n, uint64_t *out) {
    const uint8_t *p = bytes(r, (uint64_t)n);
    *out = 0;
    for (int i = 0; p && i < n; i++) *out |= (uint64_t)p[i] << (8 * i);
    return p ? 0 : -1;
}

static int push_signed(reader *r, uint64_t n) {
    if (n > 8 && r->named) return bytes(r, n) ? push(r, Py_NewRef(Py_None)) : -1;
    if (n > 8) return refuse(r, "expected integers of at most 64 bits, got a longer one");
    uint64_t value;
    if (number(r, (int)n, &value)) return -1;
    if (n && n < 8 && value >> (8 * n - 1)) value |= UINT64_MAX << (8 * n);
    return push(r, PyLong_FromLongLong((int64_t)value));
}

static int push_float(reader *r) {
    const uint8_t *p = bytes(r, 8); /* big-endian */
    uint64_t bits = 0;
    for (int i = 0; p && i < 8; i++) bits = bits << 8 | p[i];
    double value;
    memcpy(&value, &bits, sizeof value);
    return p ? push(r, PyFloat_FromDouble(value)) : -1;
}

static int push_text(reader *r, int length_bytes, bool text) {
    uint64_t n;
    if (number(r, length_bytes, &n)) return -1;
    const char *p = (const char *)bytes(r, n);
    if (!p) return -1;
    return push(r, text ? PyUnicode_DecodeUTF8(p, (Py_ssize_t)n, "surrogatepass")
                        : PyBytes_FromStringAndSize(p, (Py_ssize_t)n));
}

static int push_tuple(reader *r, size_t n) {
    if (above_mark(r) < n) return refuse(r, "a tuple needs items that are not there");
    PyObject *tuple = PyTuple_New((Py_ssize_t)n);
    if (!tuple) return -1;
    r->depth -= n;
    for (size_t i = 0; i < n; i++) PyTuple_SetItem(tuple, (Py_ssize_t)i, r->stack[r->depth + i]);
    return push(r, tuple);
}

static int pop_mark(reader *r, size_t *items) {
    if (!r->marks) return refuse(r, "a mark is missing");
    *items = above_mark(r);
    r->marks--;
    return 0;
}

static void drop(reader *r, size_t items) {
    while (items--) Py_DECREF(r->stack[--r->depth]);
}

/* Adds the last `items` objects to the list below them. */
static int append(reader *r, size_t items) {
    if (above_mark(r) < items + 1) return refuse(r, "an append has no list");
    PyObject *list = r->stack[r->depth - items - 1];
    const bool dropped = r->named && PyTuple_CheckExact(list); /* an object's state */
    if (!dropped && !PyList_CheckExact(list)) return refuse(r, "an append has no list");
    for (size_t i = r->depth - items; i < r->depth; i++)
        if (!dropped && PyList_Append(list, r->stack[i])) return -1;
    drop(r, items);
    return 0;
}

static bool is_plain_key(PyObject *key) {
    return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || PyFloat_CheckExact(key) || PyBytes_CheckExact(key) ||
           PyBool_Check(key) || key == Py_None;
}

static int set_items(reader *r, size_t items) {
    if (above_mark(r) < items + 1 || items % 2) return refuse(r, "a dict needs pairs");
    PyObject *dict = r->stack[r->depth - items - 1];
    const bool dropped = r->named && PyTuple_CheckExact(dict); /* an object's state */
    if (!dropped && !PyDict_CheckExact(dict)) return refuse(r, "an item has no dict");
    for (size_t i = r->depth - items; i < r->depth; i += 2) {
        if (dropped || (r->named && !is_plain_key(r->stack[i]))) continue;
        if (!is_plain_key(r->stack[i])) return refuse(r, "a dict key is neither number, text, bytes nor None");
        if (PyDict_SetItem(dict, r->stack[i], r->stack[i + 1])) return -1;
    }
    drop(r, items);
    return 0;
}

static int remember(reader *r, uint64_t index) {
    if (!above_mark(r)) return refuse(r, "nothing to remember");
    if (index >= (uint64_t)(r->end - r->start)) return refuse(r, "a memo index exceeds the file's size");
    if (grow(&r->memo, &r->memo_size, (size_t)index + 1, sizeof *r->memo)) return -1;
    PyObject *old = r->memo[index];
    r->memo[index] = Py_NewRef(r->stack[r->depth - 1]);
    Py_XDECREF(old);
    r->memo_used = VM_MAX(r->memo_used, (size_t)index + 1);
    return 0;
}

static int recall(reader *r, int length_bytes) {
    uint64_t index;
    if (number(r, length_bytes, &index)) return -1;
    if (index >= r->memo_used || !r->memo[index]) return refuse(r, "a memo index was never set");
    return push(r, Py_NewRef(r->memo[index]));
}

/* GLOBAL: pushes the text module.name from two lines. */
static int push_name(reader *r) {
    const char *module = (const char *)r->at, *left = (const char *)r->end;
    const char *dot = memchr(module, '\n', (size_t)(left - module));
    const char *end = dot ? memchr(dot + 1, '\n', (size_t)(left - dot - 1)) : NULL;
    if (!end) return refuse(r, "the file ends in the middle of a name");
    r->at = (const uint8_t *)end + 1;
    PyObject *a = PyUnicode_DecodeUTF8(module, dot - module, NULL), *b = NULL, *name = NULL;
    if (a) b = PyUnicode_DecodeUTF8(dot + 1, end - dot - 1, NULL);
    if (b) name = PyUnicode_FromFormat("%U.%U", a, b);
    Py_XDECREF(a);
    Py_XDECREF(b);
    return push(r, name);
}

/* STACK_GLOBAL: joins the two texts on the stack. */
static int join_name(reader *r) {
    if (above_mark(r) < 2) return refuse(r, "a name needs two texts");
    PyObject *module = r->stack[r->depth - 2], *name = r->stack[r->depth - 1];
    if (!PyUnicode_CheckExact(module) || !PyUnicode_CheckExact(name)) return refuse(r, "a name needs two texts");
    PyObject *joined = PyUnicode_FromFormat("%U.%U", module, name);
    if (!joined) return -1;
    drop(r, 2);
    return push(r, joined);
}

/* Replaces a call (a name or another call's result, and arguments) by a tuple of `parts`; an OrderedDict by a dict,
 * since its items follow. */
static int push_call(reader *r, size_t parts) {
    if (above_mark(r) < parts) return refuse(r, "a call needs a name and arguments");
    PyObject *called = r->stack[r->depth - parts], *args = r->stack[r->depth - parts + 1];
    const bool is_name = PyUnicode_CheckExact(called);
    if (!(is_name || PyTuple_CheckExact(called)) || !PyTuple_CheckExact(args))
        return refuse(r, "a call needs a name and arguments");
    if (!is_name || PyTuple_Size(args) || PyUnicode_CompareWithASCIIString(called, "collections.OrderedDict"))
        return push_tuple(r, parts);
    drop(r, parts);
    return push(r, PyDict_New());
}

static const char named_ops[] = "cRbQ\x81\x92\x93\x8f\x90\x91\x96";

static int step_named(reader *r, uint8_t op) {
    size_t items;
    switch (op) {
    case 'c': return push_name(r);
    case 0x93: return join_name(r);
    case 'R':
    case 0x81: /* NEWOBJ */ return push_call(r, 2);
    case 0x92: /* NEWOBJ_EX, with keyword arguments */ return push_call(r, 3);
    case 0x8f: /* EMPTY_SET, ADDITEMS, FROZENSET */ return push(r, PyList_New(0));
    case 0x90: return pop_mark(r, &items) ? -1 : append(r, items);
    case 0x91: return pop_mark(r, &items) ? -1 : push_tuple(r, items);
    case 0x96: /* BYTEARRAY8 */ return push_text(r, 8, false);
    default: /* BUILD: drops the state; BINPERSID: leaves the description of its object */
        if (above_mark(r) < (op == 'b' ? 2 : 1)) return refuse(r, "nothing that a name or a state belongs to");
        if (op == 'b') drop(r, 1);
        return 0;
    }
}

static int unknown(const reader *r, uint8_t op) {
    /* GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ, NEWOBJ_EX, STACK_GLOBAL, EXT1, EXT2, EXT4, PERSID, BINPERSID */
    static const char calls[] = "cRbio\x81\x92\x93\x82\x83\x84PQ";
    const bool hostile = op && strchr(calls, op);
    vm_py_refuse(PyExc_ValueError,
                 hostile ? VM_EXPECTED_IN("pickle", "byte %zd", "plain data",
                                          "opcode 0x%02x, which names or calls Python objects")
                         : VM_EXPECTED_IN("pickle", "byte %zd", "an opcode of plain data (protocol 2 to 5)", "0x%02x"),
                 (Py_ssize_t)(r->at - r->start - 1), op);
    return -1;
}

/* One opcode: 0, 1 after STOP, -1 with an exception set. */
static int step(reader *r) {
    uint64_t n;
    size_t items;
    const uint8_t *op = bytes(r, 1);
    if (!op) return -1;
    switch (*op) {
    case 0x80: /* PROTO */
        if (number(r, 1, &n)) return -1;
        return n >= 2 && n <= 5 ? 0 : refuse(r, "expected protocol 2 to 5");
    case 0x95: return bytes(r, 8) ? 0 : -1; /* FRAME: a hint */
    case '.': return r->depth == 1 && !r->marks ? 1 : refuse(r, "expected one object at the end");
    case '(':
        if (grow(&r->mark, &r->mark_size, r->marks + 1, sizeof *r->mark)) return -1;
        r->mark[r->marks++] = r->depth;
        return 0;
    case '0': /* POP */
        if (!above_mark(r)) return refuse(r, "nothing to drop");
        drop(r, 1);
        return 0;
    case '1': /* POP_MARK */
        if (pop_mark(r, &items)) return -1;
        drop(r, items);
        return 0;
    case '2': /* DUP */
        if (!above_mark(r)) return refuse(r, "nothing to repeat");
        return push(r, Py_NewRef(r->stack[r->depth - 1]));
    case 'N': return push(r, Py_NewRef(Py_None));
    case 0x88: return push(r, Py_NewRef(Py_True));
    case 0x89: return push(r, Py_NewRef(Py_False));
    case 'J': return push_signed(r, 4);
    case 'K': return number(r, 1, &n) ? -1 : push(r, PyLong_FromLong((long)n));
    case 'M': return number(r, 2, &n) ? -1 : push(r, PyLong_FromLong((long)n));
    case 0x8a: return number(r, 1, &n) ? -1 : push_signed(r, n);
    case 0x8b: return number(r, 4, &n) ? -1 : push_signed(r, n);
    case 'G': return push_float(r);
    case 0x8c: return push_text(r, 1, true);
    case 'X': return push_text(r, 4, true);
    case 0x8d: return push_text(r, 8, true);
    case 'C': return push_text(r, 1, false);
    case 'B': return push_text(r, 4, false);
    case 0x8e: return push_text(r, 8, false);
    case ']': return push(r, PyList_New(0));
    case '}': return push(r, PyDict_New());
    case ')': return push_tuple(r, 0);
    case 0x85: /* TUPLE1, TUPLE2, TUPLE3 */
    case 0x86:
    case 0x87: return push_tuple(r, *op - 0x84u);
    case 't': return pop_mark(r, &items) ? -1 : push_tuple(r, items);
    case 'a': return append(r, 1);
    case 'e': return pop_mark(r, &items) ? -1 : append(r, items);
    case 's': return set_items(r, 2);
    case 'u': return pop_mark(r, &items) ? -1 : set_items(r, items);
    case 'q': return number(r, 1, &n) ? -1 : remember(r, n);
    case 'r': return number(r, 4, &n) ? -1 : remember(r, n);
    case 0x94: return remember(r, r->memo_used); /* MEMOIZE */
    case 'h': return recall(r, 1);
    case 'j': return recall(r, 4);
    default: return r->named && *op && strchr(named_ops, *op) ? step_named(r, *op) : unknown(r, *op);
    }
}

static PyObject *read_pickle(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"", "named", NULL};
    Py_buffer view;
    int named = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*|p:read_pickle", names, &view, &named)) return NULL;
    reader r = {.start = view.buf, .at = view.buf, .end = (const uint8_t *)view.buf + view.len, .named = named};
    int done = 0;
    for (size_t steps = 1; !done; steps++) {
        done = step(&r);
        if (!done && steps % (1 << 18) == 0 && PyErr_CheckSignals()) done = -1;
    }
    PyObject *result = done == 1 ? r.stack[--r.depth] : NULL;
    drop(&r, r.depth);
    for (size_t i = 0; i < r.memo_used; i++) Py_XDECREF(r.memo[i]);
    PyMem_Free(r.stack);
    PyMem_Free(r.memo);
    PyMem_Free(r.mark);
    PyBuffer_Release(&view);
    return result;
}

PyMethodDef vm_py_unpickle[] = {
    {"read_pickle", (PyCFunction)(void (*)(void))read_pickle, METH_VARARGS | METH_KEYWORDS,
     "read_pickle(data, /, named=False)\n--\n\nReturns the object in a pickle of plain data (protocol 2 to 5): "
     "dict, list, tuple, int of 64 bits, float, str, bytes, bool and None. named: names become text, and calls "
     "tuples of the name and the arguments; none is looked up or called, and items of other objects are "
     "dropped.\n\nRaises ValueError for anything else, and for a pickle that is cut or corrupt."},
    {NULL, NULL, 0, NULL}};
