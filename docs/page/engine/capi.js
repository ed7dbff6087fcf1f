/* Python's C API over Brython's objects: with it the package's own bindings (csrc/python), compiled to WebAssembly, run
 * in the page.
 *
 * C knows an object by a number. An object of one of C's own types has the address of its struct, which is even. Every
 * other object has an odd number: twice its place in `slots`, and 1. A slot counts C's references. The first slots are
 * FIXED, in the order of include/Python.h. What C borrows, and the text of strings, live until the outermost call
 * returns. */
"use strict";

function makeCore($B, wasm, helpers) {
    const b = $B.builtins, None = b.None;
    const FIXED = [None, true, false, b.TypeError, b.ValueError, b.RuntimeError, b.OverflowError, b.MemoryError,
                   b.KeyError, b.tuple, b.list, b.dict, b.int, b.str, b.bool, b.float, b.bytes, helpers.ndarray];
    const METH_KEYWORDS = 2, METH_NOARGS = 4, METH_O = 8, METH_CLASS = 16, METH_STATIC = 32;
    const [TP_BASE, , TP_DEALLOC, , TP_FREE, TP_GETSET, TP_METHODS, TP_NEW] = [1, 2, 3, 4, 5, 6, 7, 8];
    const PINNED = 1e9;

    let exports, memory, table;
    let bytes = new Uint8Array(), words = new Int32Array(), doubles = new DataView(new ArrayBuffer());
    const text = new TextDecoder(), encoder = new TextEncoder();
    const freshen = () => {
        if (bytes.buffer === memory.buffer) return;
        bytes = new Uint8Array(memory.buffer);
        words = new Int32Array(memory.buffer);
        doubles = new DataView(memory.buffer);
    };
    // JavaScript gets addresses as signed numbers: those from 2 GiB on are negative.
    const word = at => (freshen(), words[at >>> 2]);
    const setWord = (at, value) => { freshen(); words[at >>> 2] = value; };
    const long = at => (freshen(), doubles.getBigUint64(at >>> 0, true));
    const setLong = (at, value) => { freshen(); doubles.setBigUint64(at >>> 0, BigInt.asUintN(64, value), true); };
    const double = at => (freshen(), doubles.getFloat64(at >>> 0, true));
    const span = (at, size) => (freshen(), bytes.subarray(at >>> 0, (at >>> 0) + size));
    const string = at => at ? text.decode(span(at, (freshen(), bytes.indexOf(0, at >>> 0)) - (at >>> 0))) : null;
    const allocate = size => exports.malloc(size) || $B.RAISE(b.MemoryError, "the page's memory is full");

    // ---- objects ----

    const slots = FIXED.map(object => ({object, count: PINNED})), empty = [], pinned = new Map();
    FIXED.forEach((object, i) => pinned.set(object, 2 * i + 1));
    // Of C's own objects, by address: those that C refers to, all, and their types. Then types, by number.
    const own = new Map(), weak = new Map(), typeAt = new Map(), types = new Map();
    const gone = new FinalizationRegistry(address => {
        weak.delete(address);
        table.get(described(get(typeAt.get(address))).dealloc)(address);
        typeAt.delete(address);
    });

    const put = (object, count) => {
        const i = empty.length ? empty.pop() : slots.push(null) - 1;
        slots[i] = {object, count};
        return 2 * i + 1;
    };
    const pin = object => {
        let number = pinned.get(object);
        if (number === undefined) pinned.set(object, number = put(object, PINNED));
        return number;
    };
    const toC = object => { // a new reference
        const address = object.$address;
        if (address !== undefined) {
            own.set(address, object);
            setWord(address, word(address) + 1);
            return address;
        }
        if (typeof object !== "number" && typeof object !== "string") {
            const number = pinned.get(object);
            if (number !== undefined) return number;
        }
        return put(object, 1);
    };
    const get = number => number & 1 ? slots[number >> 1].object : own.get(number) ?? weak.get(number).deref();
    const keep = number => {
        if (number & 1) slots[number >> 1].count++;
        else {
            own.set(number, get(number));
            setWord(number, word(number) + 1);
        }
    };
    const drop = number => {
        if (number & 1) {
            const slot = slots[number >> 1];
            if (--slot.count) return;
            slots[number >> 1] = null;
            empty.push(number >> 1);
        } else {
            const count = word(number) - 1;
            setWord(number, count);
            if (!count) own.delete(number);
        }
    };
    const take = number => { // the object of a reference that C gives up
        const object = get(number);
        drop(number);
        return object;
    };

    // ---- what lives until the outermost call returns ----

    let depth = 0, borrowed = [], texts = [];
    const lend = object => {
        const number = toC(object);
        borrowed.push(number);
        return number;
    };
    const lendText = (object, length) => {
        const coded = encoder.encode(object), at = allocate(coded.length + 1);
        span(at, coded.length + 1).set(coded);
        span(at + coded.length, 1)[0] = 0;
        texts.push(at);
        if (length) setWord(length, coded.length);
        return at;
    };

    // ---- errors ----

    let error = null;
    const fail = (type, message) => {
        error = $B.$call(type, message);
        return 0;
    };
    const attempt = (work, otherwise = 0) => {
        try {
            return work();
        } catch (raised) {
            error = $B.exception(raised);
            return otherwise;
        }
    };
    const itemsOf = new WeakMap(); // of dicts that C walks through
    const typeOf = object => $B.get_class(object);

    // ---- numbers ----

    const toInt = big => BigInt.asIntN(53, big) === big ? Number(big) : big;
    const whole = object => typeof object === "boolean" ? +object : typeof object === "object" ? object.value : object;
    const isWhole = object => ["number", "bigint", "boolean"].includes(typeof object) || $B.is_int(object);
    const asLong = (object, low, high) => {
        if (!isWhole(object)) {
            fail(b.TypeError, "an integer is required");
            return -1n;
        }
        const big = BigInt(whole(object));
        if (big >= low && big <= high) return big;
        fail(b.OverflowError, "Python int too large to convert to C");
        return -1n;
    };
    const U32 = (1n << 32n) - 1n, U64 = (1n << 64n) - 1n, I31 = (1n << 31n) - 1n, I63 = (1n << 63n) - 1n;
    const asFloat = object => object.value !== undefined ? Number(object.value) : Number(object);

    // ---- C's variable arguments, which lie in memory ----

    const reader = at => ({
        word: () => (at += 4, word(at - 4)),
        long: () => (at = (at + 15) & ~7, long(at - 8)),
        double: () => (at = (at + 15) & ~7, double(at - 8)),
    });

    const DIRECTIVE = /%([0-9.]*)(z|ll|l|)([a-zA-Z%])/g;
    const format = (pattern, values) => string(pattern).replace(DIRECTIVE, (all, _, size, kind) => {
        if (kind === "%") return "%";
        if (kind === "s") return string(values.word()) ?? "(null)";
        if (kind === "U") return get(values.word());
        if (kind === "R") return b.repr(get(values.word()));
        if (kind === "d") return String(size === "ll" ? BigInt.asIntN(64, values.long()) : values.word());
        if (kind === "u") return String(size === "ll" ? values.long() : values.word() >>> 0);
        throw Error(`capi.js: no ${all} in a message`);
    });

    const build = (pattern, values) => {
        let at = 0;
        const end = {"(": ")", "{": "}"};
        const item = () => {
            const kind = pattern[at++];
            switch (kind) {
            case "s": case "z": { const where = values.word(); return where ? string(where) : None; }
            case "n": case "i": case "l": return values.word();
            case "I": case "k": return values.word() >>> 0;
            case "K": return toInt(values.long());
            case "L": return toInt(BigInt.asIntN(64, values.long()));
            case "d": case "f": return $B.fast_float(values.double());
            case "O": return get(values.word());
            case "N": { const number = values.word(); return number ? take(number) : undefined; }
            case "(": return $B.fast_tuple(items(")"));
            case "{": {
                const pairs = items("}"), dict = $B.empty_dict();
                for (let i = 0; i < pairs.length; i += 2) b.dict.$setitem(dict, pairs[i], pairs[i + 1]);
                return dict;
            }
            default: throw Error(`capi.js: no ${kind} in ${pattern}`);
            }
        };
        const items = last => {
            const all = [];
            while (at < pattern.length && pattern[at] !== last) {
                if (", :".includes(pattern[at])) at++;
                else all.push(item());
            }
            at++;
            return all;
        };
        const all = items("");
        return error ? undefined : all.length === 1 ? all[0] : all.length ? $B.fast_tuple(all) : None;
    };

    // Stores one argument; false with an error set.
    const store = (object, kind, values, name) => {
        const at = values.word();
        const wrong = wanted => {
            fail(b.TypeError, `${name}: expected ${wanted}, got ${$B.class_name(object)}`);
            return false;
        };
        switch (kind) {
        case "O": setWord(at, lend(object)); return true;
        case "O!": {
            if (!b.isinstance(object, get(at))) return wrong($B.class_name(get(at)));
            setWord(values.word(), lend(object));
            return true;
        }
        case "O&": return !!table.get(at)(lend(object), values.word()) || (error || wrong("another value"), false);
        case "s": case "z":
            if (kind === "z" && object === None) setWord(at, 0);
            else if (typeof object !== "string") return wrong("str");
            else setWord(at, lendText(object));
            return true;
        case "p": setWord(at, +$B.$bool(object)); return true;
        case "i": case "n": case "l": case "I": case "k": {
            if (!isWhole(object)) return wrong("int");
            const big = asLong(object, -I31 - 1n, U32);
            if (error) return false;
            setWord(at, Number(BigInt.asIntN(32, big)));
            return true;
        }
        case "K": case "L":
            if (!isWhole(object)) return wrong("int");
            setLong(at, BigInt(whole(object)));
            return true;
        case "d":
            freshen();
            doubles.setFloat64(at >>> 0, asFloat(object), true);
            return true;
        default: throw Error(`capi.js: no ${kind} among arguments`);
        }
    };

    const parse = (args, kwargs, pattern, names, values) => {
        const kinds = pattern.replace(/:.*/, "").match(/[|$]|O[!&]|[a-zA-Z]\*?/g) ?? [];
        let place = 0, required = true, used = 0;
        for (const kind of kinds) {
            if (kind === "|") required = false;
            if (kind === "|" || kind === "$") continue;
            const name = names ? string(word(names + 4 * place)) : String(place + 1);
            let object = args[place++];
            if (object === undefined && kwargs && name && b.dict.$contains(kwargs, name)) {
                object = b.dict.$getitem(kwargs, name);
                used++;
            }
            if (object === undefined) {
                if (required) return fail(b.TypeError, `missing argument ${name}`);
                values.word();
                if (kind.length > 1) values.word();
            } else if (!store(object, kind, values, name)) return 0;
        }
        if (args.length > place) return fail(b.TypeError, `expected at most ${place} arguments, got ${args.length}`);
        if (kwargs && b.len(kwargs) > used) return fail(b.TypeError, "got an unexpected keyword argument");
        return 1;
    };

    // ---- calls from Python ----

    const within = work => { // the end of the outermost call frees what C borrowed
        depth++;
        try {
            return finish(work());
        } finally {
            if (!--depth) {
                borrowed.forEach(drop);
                texts.forEach(exports.free);
                borrowed = [];
                texts = [];
            }
        }
    };
    const call = (pointer, flags, self, args, kwargs) => within(() => {
        const me = self === None ? 0 : lend(self), run = table.get(pointer);
        if (flags & METH_NOARGS) return run(me, 0);
        if (flags & METH_O) return run(me, lend(args[0]));
        if (flags & METH_KEYWORDS) return run(me, lend(args), b.len(kwargs) ? lend(kwargs) : 0);
        return run(me, lend(args));
    });
    const read = (pointer, self, closure) => within(() => table.get(pointer)(lend(self), closure));
    const finish = number => {
        if (number) return take(number);
        const raised = error ?? Error("capi.js: C failed without an exception");
        error = null;
        throw raised;
    };

    // ---- types and modules ----

    const module = {};
    const methodsAt = at => {
        const all = [];
        for (; word(at); at += 16) all.push([string(word(at)), word(at + 4), word(at + 8)]);
        return all;
    };
    const caller = helpers.caller;
    const addFunctions = at => methodsAt(at).forEach(([name, pointer, flags]) => {
        module[name] = $B.$call(caller, pointer, flags, true);
    });
    const makeType = spec => {
        const type = {name: string(word(spec)), size: word(spec + 4)}, slot = {};
        for (let at = word(spec + 16); word(at); at += 8) slot[word(at)] = word(at + 4);
        type.dealloc = slot[TP_DEALLOC];
        const names = $B.empty_dict(), add = (name, value) => b.dict.$setitem(names, name, value);
        for (const [name, pointer, flags] of slot[TP_METHODS] ? methodsAt(slot[TP_METHODS]) : []) {
            const made = $B.$call(caller, pointer, flags, !!(flags & METH_STATIC));
            add(name, flags & METH_STATIC ? $B.$call(b.staticmethod, made)
                      : flags & METH_CLASS ? $B.$call(b.classmethod, made) : made);
        }
        for (let at = slot[TP_GETSET] ?? 0; at && word(at); at += 20)
            add(string(word(at)), $B.$call(helpers.getter, word(at + 4), word(at + 16)));
        const made = $B.$call(helpers.make_type, type.name, slot[TP_NEW] ?? 0, names);
        types.set(pin(made), type);
        return made;
    };
    const described = cls => {
        while (!types.has(pin(cls))) cls = cls.tp_bases[0];
        return types.get(pin(cls));
    };

    const python = {
        Py_INCREF_: keep,
        Py_DECREF_: drop,
        Py_TYPE_: number => number & 1 ? pin(typeOf(get(number))) : typeAt.get(number),
        vm_instance: (number, type, exact) => {
            const object = get(number), wanted = get(type);
            return +(typeOf(object) === wanted || (!exact && b.isinstance(object, wanted)));
        },

        PyArg_ParseTuple: (args, pattern, values) => parse(get(args), null, string(pattern), 0, reader(values)),
        PyArg_ParseTupleAndKeywords: (args, kwargs, pattern, names, values) =>
            parse(get(args), kwargs ? get(kwargs) : null, string(pattern), names, reader(values)),
        PyArg_Parse: (object, pattern, values) => parse([get(object)], null, string(pattern), 0, reader(values)),
        Py_BuildValue: (pattern, values) => {
            const made = build(string(pattern), reader(values));
            return made === undefined ? 0 : toC(made);
        },
        PyCallable_Check: number => +b.callable(get(number)),

        PyDict_New: () => toC($B.empty_dict()),
        PyDict_Copy: dict => attempt(() => toC($B.$call(helpers.copy_dict, get(dict)))),
        PyDict_GetItemString: (dict, key) => {
            const name = string(key), object = get(dict);
            return b.dict.$contains(object, name) ? lend(b.dict.$getitem(object, name)) : 0;
        },
        PyDict_SetItemString: (dict, key, value) =>
            attempt(() => (b.dict.$setitem(get(dict), string(key), get(value)), 0), -1),
        PyDict_SetItem: (dict, key, value) =>
            attempt(() => (b.dict.$setitem(get(dict), get(key), get(value)), 0), -1),
        PyDict_Next: (dict, place, key, value) => {
            const at = word(place), items = at ? itemsOf.get(get(dict)) : $B.$call(helpers.items, get(dict));
            if (!at) itemsOf.set(get(dict), items);
            if (at >= items.length) return 0;
            setWord(place, at + 1);
            setWord(key, lend(items[at][0]));
            setWord(value, lend(items[at][1]));
            return 1;
        },

        PyErr_Clear: () => { error = null; },
        PyErr_ExceptionMatches: type => +(error !== null && b.isinstance(error, get(type))),
        PyErr_Fetch: (type, value, traceback) => {
            setWord(type, error ? pin(typeOf(error)) : 0);
            setWord(value, error ? toC(error) : 0);
            setWord(traceback, 0);
            error = null;
        },
        PyErr_Restore: (type, value) => { error = value ? take(value) : null; },
        PyErr_Format: (type, pattern, values) => fail(get(type), format(pattern, reader(values))),
        PyErr_NewExceptionWithDoc: (name, doc, base) =>
            toC($B.$call(helpers.make_exception, string(name), string(doc), get(base))),
        PyErr_NoMemory: () => fail(b.MemoryError, ""),
        PyErr_Occurred: () => error ? pin(typeOf(error)) : 0,
        PyErr_SetObject: (type, value) => { error = get(value); },
        PyErr_SetString: (type, message) => { fail(get(type), string(message)); },

        PyFloat_AsDouble: number => attempt(() => asFloat($B.$call(b.float, get(number))), -1),
        PyFloat_FromDouble: value => toC($B.fast_float(value)),
        PyImport_ImportModule: name => attempt(() => toC($B.$call(helpers.import_module, string(name)))),

        PyList_Append: (list, item) => (get(list).push(get(item)), 0),
        PyList_AsTuple: list => toC($B.fast_tuple(get(list).slice())),
        PyList_GetItem: (list, i) => lend(get(list)[i]),
        PyList_New: size => toC($B.$list(new Array(size).fill(None))),
        PyList_SetItem: (list, i, item) => (get(list)[i] = take(item), 0),
        PyList_Size: list => get(list).length,
        PyTuple_GetItem: (tuple, i) => lend(get(tuple)[i]),
        PyTuple_New: size => toC($B.fast_tuple(new Array(size).fill(None))),
        PyTuple_Pack: (size, at) => {
            const values = reader(at);
            return toC($B.fast_tuple(Array.from({length: size}, () => get(values.word()))));
        },
        PyTuple_SetItem: (tuple, i, item) => (get(tuple)[i] = take(item), 0),
        PyTuple_Size: tuple => get(tuple).length,
        PySequence_Concat: (one, other) => toC($B.fast_tuple([...get(one), ...get(other)])),
        PySequence_Tuple: number => {
            const object = get(number);
            if ($B.is_list(object) || $B.is_tuple(object)) return toC($B.fast_tuple(object.slice()));
            return attempt(() => toC($B.$call(b.tuple, object)));
        },

        PyLong_AsLong: number => Number(asLong(get(number), -I31 - 1n, I31)),
        PyLong_AsLongLong: number => asLong(get(number), -I63 - 1n, I63),
        PyLong_AsSize_t: number => Number(asLong(get(number), 0n, U32)) | 0,
        PyLong_AsUnsignedLong: number => Number(asLong(get(number), 0n, U32)) | 0,
        PyLong_AsUnsignedLongLong: number => asLong(get(number), 0n, U64),
        PyLong_FromLong: value => put(value, 1),
        PyLong_FromLongLong: value => put(toInt(value), 1),
        PyLong_FromSize_t: value => put(value >>> 0, 1),
        PyLong_FromUnsignedLong: value => put(value >>> 0, 1),
        PyLong_FromUnsignedLongLong: value => put(toInt(BigInt.asUintN(64, value)), 1),
        PyBool_FromLong: value => pinned.get(value !== 0),
        PyNumber_Index: number => {
            if (isWhole(get(number))) return keep(number), number;
            return attempt(() => toC($B.$call(helpers.index, get(number))));
        },

        PyModuleDef_Init: definition => {
            addFunctions(word(definition + 16));
            for (let at = word(definition + 20); word(at); at += 8) table.get(word(at + 4))(pin(module));
            return 0;
        },
        PyModule_AddFunctions: (_, at) => (addFunctions(at), 0),
        PyModule_AddObjectRef: (_, name, object) => (module[string(name)] = get(object), 0),
        PyModule_AddType: (_, type) => (module[types.get(type).name.split(".").pop()] = get(type), 0),

        PyObject_CallFunction: (called, pattern, values) => attempt(() => {
            const args = pattern ? build(`(${string(pattern)})`, reader(values)) : [];
            return toC($B.$call(get(called), ...args));
        }),
        PyObject_CallMethod: (object, name, pattern, values) => attempt(() => {
            const args = build(`(${string(pattern)})`, reader(values));
            return toC($B.$call($B.$getattr(get(object), string(name)), ...args));
        }),
        PyObject_GetAttrString: (object, name) => attempt(() => {
            const of = get(object);
            return toC(of === module ? module[string(name)] : $B.$getattr(of, string(name)));
        }),
        PyObject_IsTrue: number => attempt(() => +$B.$bool(get(number)), -1),
        PyObject_SetAttrString: (object, name, value) =>
            attempt(() => ($B.$call(b.setattr, get(object), string(name), get(value)), 0), -1),

        PyType_FromModuleAndSpec: (_, spec) => toC(makeType(spec)),
        PyType_GenericAlloc: type => {
            const cls = get(type), of = described(cls), address = allocate(of.size);
            span(address, of.size).fill(0);
            setWord(address, 1);
            const object = $B.$call(helpers.allocate, cls);
            object.$address = address;
            own.set(address, object);
            weak.set(address, new WeakRef(object));
            typeAt.set(address, pin(cls));
            gone.register(object, address);
            return address;
        },
        PyType_GetModule: () => pin(module),
        PyType_GetName: type => toC($B.class_name({ob_type: get(type)})),
        PyType_GetSlot: (type, slot) => {
            if (slot === TP_FREE) return freeAt;
            if (slot === TP_DEALLOC) return types.get(type)?.dealloc ?? 0;
            return slot === TP_BASE && !types.has(type) && get(type).tp_bases.length ? pin(get(type).tp_bases[0]) : 0;
        },

        PyUnicode_AsUTF8AndSize: (number, length) => {
            const object = get(number);
            return typeof object === "string" ? lendText(object, length) : fail(b.TypeError, "expected str");
        },
        PyUnicode_CompareWithASCIIString: (number, at) => +(get(number) !== string(at)),
        PyUnicode_DecodeUTF8: (at, size) => toC(text.decode(span(at, size))),
        PyUnicode_FromFormat: (pattern, values) => toC(format(pattern, reader(values))),
        PyUnicode_FromFormatV: (pattern, values) => toC(format(pattern, reader(values))),
        PyUnicode_FromString: at => toC(string(at)),
        PyUnicode_Split: (object, separator, most) => {
            const parts = get(object).split(get(separator));
            if (parts.length > most + 1) parts.push(parts.splice(most).join(get(separator)));
            return toC($B.$list(parts));
        },

        PyArray_SimpleNew: (dims, sizes, type) => {
            const length = word(sizes), address = allocate(8 * length + 1), object = $B.$call(helpers.ndarray);
            object.$data = {address, length};
            freed.register(object, address);
            return toC(object);
        },
        PyArray_DATA: number => get(number).$data.address,
        pthread_atfork: () => 0,
    };
    const freed = new FinalizationRegistry(address => exports.free(address));
    const tolist = array => {
        const {address, length} = array.$data, all = [];
        for (let i = 0; i < length; i++) all.push(toInt(long(address + 8 * i)));
        return $B.$list(all);
    };

    const missing = name => () => { throw Error(`capi.js: the page has no ${name}`); };
    const imports = {};
    for (const {module: from, name} of WebAssembly.Module.imports(wasm))
        (imports[from] ??= {})[name] = python[name] ?? missing(name);
    exports = new WebAssembly.Instance(wasm, imports).exports;
    memory = exports.memory;
    table = exports.__indirect_function_table;
    const freeAt = exports.free_pointer();
    exports._initialize();
    return {module, call, read, tolist, start: exports.PyInit__core, bytes: () => memory.buffer.byteLength};
}
