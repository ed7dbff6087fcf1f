/* Python's stable ABI over Brython's objects: with it the package's own bindings (csrc/python), compiled to WebAssembly
 * with Python's own headers, run in the page.
 *
 * C knows an object by the address of two words: how many references C has to it, and the address of its type. C counts
 * by itself, and calls _Py_Dealloc when none is left. An object of one of C's own types goes on there, and lives until
 * Python has no reference either. What C borrows, and the text of strings, live until the outermost call returns. */
"use strict";

function makeCore($B, wasm, caller, getter, make_object) {
    const b = $B.builtins, None = b.None, NAMES = {Long: "int", Unicode: "str"};
    const FLAGGED = [b.int, b.list, b.tuple, b.bytes, b.str, b.dict]; // in the order of their Py_TPFLAGS, from bit 24
    const METH_NEW = 3, METH_NOARGS = 4, METH_O = 8, METH_CLASS = 16, METH_STATIC = 32;
    const TP_BASE = 48, TP_DEALLOC = 52, TP_METHODS = 64, TP_NEW = 65, TP_GETSET = 73, TP_FREE = 74;
    const FIXED = 1 << 29; // references, never counted down to 0

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
    const setDouble = (at, value) => { freshen(); doubles.setFloat64(at >>> 0, value, true); };
    const span = (at, size) => (freshen(), bytes.subarray(at >>> 0, (at >>> 0) + size));
    const string = at => at ? text.decode(span(at, (freshen(), bytes.indexOf(0, at >>> 0)) - (at >>> 0))) : null;
    const allocate = size => exports.malloc(size) || $B.RAISE(b.MemoryError, "the page's memory is full");

    // ---- objects ----

    const objects = new Map(), types = new Map(), flags = new Map(); // by address; types: C's own
    const fixed = new Map(), empty = []; // addresses of objects that C may always know; addresses to use again
    const gone = new FinalizationRegistry(free => free());
    const fix = (object, at) => {
        objects.set(at, object);
        fixed.set(object, at);
        setWord(at, FIXED);
        setWord(at + 4, object === b.type ? at : typeAt(object));
        return at;
    };
    const fixedAt = object => fixed.get(object) ?? fix(object, allocate(8));
    const typeAt = object => fixedAt($B.get_class(object));
    const toC = object => { // a new reference
        let at = object.$address ?? (typeof object === "string" ? undefined : fixed.get(object));
        if (at === undefined) {
            at = empty.pop() ?? allocate(8);
            setWord(at, 0);
            setWord(at + 4, typeAt(object));
        }
        if (!word(at)) objects.set(at, object);
        setWord(at, word(at) + 1);
        return at;
    };
    const get = at => objects.get(at);
    const release = at => {
        if (get(at).$address === undefined) empty.push(at);
        objects.delete(at);
    };
    const drop = at => {
        setWord(at, word(at) - 1);
        if (!word(at)) release(at);
    };
    const take = at => { // the object of a reference that C gives up
        const object = get(at);
        drop(at);
        return object;
    };

    // ---- what lives until the outermost call returns ----

    let depth = 0, borrowed = [], texts = [], error = null;
    const lend = object => {
        const at = toC(object);
        borrowed.push(at);
        return at;
    };
    const lendText = (object, length) => {
        const coded = encoder.encode(object), at = allocate(coded.length + 1);
        span(at, coded.length).set(coded);
        span(at + coded.length, 1)[0] = 0;
        texts.push(at);
        if (length) setWord(length, coded.length);
        return at;
    };
    const last = name => name.split(".").pop(), nameOf = type => $B.class_name({ob_type: type});

    // ---- numbers ----

    const toInt = big => BigInt.asIntN(53, big) === big ? Number(big) : big;
    const isWhole = object => ["number", "bigint", "boolean"].includes(typeof object) || $B.is_int(object);
    const asLong = (object, low, high) => {
        const big = BigInt(isWhole(object) ? $B.PyNumber_Index(object) : $B.RAISE(b.TypeError, "expected an integer"));
        return big >= low && big <= high ? big : $B.RAISE(b.OverflowError, "Python int too large to convert to C");
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
        const item = () => {
            const kind = pattern[at++];
            switch (kind) {
            case "s": case "z": return string(values.word()) ?? None;
            case "n": case "i": case "l": return values.word();
            case "I": case "k": return values.word() >>> 0;
            case "K": return toInt(values.long());
            case "L": return toInt(BigInt.asIntN(64, values.long()));
            case "d": case "f": return $B.fast_float(values.double());
            case "O": return get(values.word());
            case "N": { const given = values.word(); return given ? take(given) : undefined; }
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
            for (; at < pattern.length && pattern[at] !== last; ) ", :".includes(pattern[at]) ? at++ : all.push(item());
            at++;
            return all;
        };
        const all = items("");
        if (error) throw error;
        return all.length === 1 ? all[0] : all.length ? $B.fast_tuple(all) : None;
    };

    // Stores one argument.
    const store = (object, kind, values, name) => {
        const at = values.word();
        const wrong = wanted =>
            $B.RAISE(b.TypeError, `${name}: expected ${wanted}, got ${$B.class_name(object)}`);
        if ("inlIkKL".includes(kind) && !isWhole(object)) wrong("int");
        if ("sz".includes(kind) && typeof object !== "string" && !(kind === "z" && object === None)) wrong("str");
        switch (kind) {
        case "O": return setWord(at, lend(object));
        case "O!":
            return setWord(values.word(), b.isinstance(object, get(at)) ? lend(object) : wrong(nameOf(get(at))));
        case "O&": if (table.get(at)(lend(object), values.word())) return; throw error;
        case "s": case "z": return setWord(at, object === None ? 0 : lendText(object));
        case "p": return setWord(at, +$B.$bool(object));
        case "i": case "n": case "l": case "I": case "k": return setWord(at, Number(asLong(object, -I31 - 1n, U32)));
        case "K": case "L": return setLong(at, BigInt($B.PyNumber_Index(object)));
        case "d": return setDouble(at, asFloat(object));
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
            if (object !== undefined) store(object, kind, values, name);
            else if (required) $B.RAISE(b.TypeError, `missing argument ${name}`);
            else for (const _ of kind) values.word();
        }
        if (args.length > place) $B.RAISE(b.TypeError, `expected at most ${place} arguments, got ${args.length}`);
        if (kwargs && b.len(kwargs) > used) $B.RAISE(b.TypeError, "got an unexpected keyword argument");
        return 1;
    };

    // ---- calls from Python ----

    const within = work => { // the end of the outermost call frees what C borrowed
        depth++;
        try {
            const made = work();
            if (made) return take(made);
            const raised = error ?? Error("capi.js: C failed without an exception");
            error = null;
            throw raised;
        } finally {
            if (!--depth) {
                borrowed.forEach(drop);
                texts.forEach(exports.free);
                borrowed = [];
                texts = [];
            }
        }
    };
    const call = (pointer, flags, isFree, given, kwargs) => within(() => {
        const me = isFree ? 0 : lend(given[0]), args = isFree ? given : $B.fast_tuple(given.slice(1));
        const more = flags & METH_NOARGS ? 0 : lend(flags & METH_O ? args[0] : args);
        return table.get(pointer)(me, more, b.len(kwargs) ? lend(kwargs) : 0); // the last only for METH_KEYWORDS
    });
    const read = (pointer, self, closure) => within(() => table.get(pointer)(lend(self), closure));

    // ---- types and modules ----

    const module = $B.empty_dict();
    const add = (names, name, value) => { b.dict.$setitem(names, name, value); return 0; };
    const addMethods = (names, at, isFree) => {
        for (; at && word(at); at += 16) {
            const flags = word(at + 8);
            const wrap = flags & METH_STATIC ? b.staticmethod : flags & METH_CLASS ? b.classmethod : null;
            const made = $B.$call(caller, word(at + 4), flags, isFree || !!(flags & METH_STATIC));
            add(names, string(word(at)), wrap ? $B.$call(wrap, made) : made);
        }
        return 0;
    };
    const makeType = spec => {
        const slot = {}, names = $B.empty_dict(), name = last(string(word(spec)));
        for (let at = word(spec + 16); word(at); at += 8) slot[word(at)] = word(at + 4);
        addMethods(names, slot[TP_METHODS], false);
        for (let at = slot[TP_GETSET]; at && word(at); at += 20)
            add(names, string(word(at)), $B.$call(getter, word(at + 4), word(at + 16)));
        if (slot[TP_NEW]) add(names, "__new__", $B.$call(caller, slot[TP_NEW], METH_NEW, false));
        const made = $B.$call(b.type, name, $B.fast_tuple([b.object]), names);
        types.set(fixedAt(made), {name, size: word(spec + 4), dealloc: slot[TP_DEALLOC]});
        return made;
    };
    const described = cls => types.get(fixedAt(cls)) ?? described(cls.tp_bases[0]);

    const python = {
        _Py_Dealloc: release,
        PyArg_ParseTuple: (args, pattern, values) => parse(get(args), null, string(pattern), 0, reader(values)),
        PyArg_ParseTupleAndKeywords: (args, kwargs, pattern, names, values) =>
            parse(get(args), kwargs ? get(kwargs) : null, string(pattern), names, reader(values)),
        Py_BuildValue: (pattern, values) => toC(build(string(pattern), reader(values))),

        PyDict_New: () => toC($B.empty_dict()),
        PyDict_Copy: dict => toC($B.$call(b.dict, get(dict))),
        PyDict_GetItemString: (dict, key) => {
            const name = string(key), object = get(dict);
            return b.dict.$contains(object, name) ? lend(b.dict.$getitem(object, name)) : 0;
        },
        PyDict_SetItemString: (dict, key, value) => add(get(dict), string(key), get(value)),
        PyDict_SetItem: (dict, key, value) => add(get(dict), get(key), get(value)),
        PyDict_Items: dict => toC($B.$list(
            Array.from(b.dict.$iter_items(get(dict)), ({key, value}) => $B.fast_tuple([key, value])))),

        PyErr_CheckSignals: () => 0,
        PyErr_Clear: () => { error = null; },
        PyErr_ExceptionMatches: type => +(error !== null && b.isinstance(error, get(type))),
        PyErr_NewExceptionWithDoc: (name, doc, base) =>
            toC($B.$call(b.type, last(string(name)), $B.fast_tuple([get(base)]), $B.empty_dict())),
        PyErr_NoMemory: () => $B.RAISE(b.MemoryError, ""),
        PyErr_Occurred: () => error ? typeAt(error) : 0,
        PyErr_SetObject: (type, value) => { error = get(value); },
        PyErr_SetString: (type, message) => { error = $B.$call(get(type), string(message)); },
        PyEval_RestoreThread: () => {},
        PyEval_SaveThread: () => 0,

        PyFloat_AsDouble: number => asFloat($B.$call(b.float, get(number))),
        PyFloat_FromDouble: value => toC($B.fast_float(value)),
        PyImport_ImportModule: name => toC($B.imported[string(name)]),

        PyList_Append: (list, item) => (get(list).push(get(item)), 0),
        PyList_AsTuple: list => toC($B.fast_tuple(get(list).slice())),
        PyList_GetItem: (list, i) => lend(get(list)[i]),
        PyList_New: () => toC($B.$list([])), // of 0 items
        PyList_Size: list => get(list).length,
        PyTuple_GetItem: (tuple, i) => lend(get(tuple)[i]),
        PyTuple_Size: tuple => get(tuple).length,
        PySequence_Concat: (one, other) => toC($B.fast_tuple([...get(one), ...get(other)])),
        PySequence_Tuple: sequence => {
            const object = get(sequence), isArray = $B.is_list(object) || $B.is_tuple(object);
            return toC(isArray ? $B.fast_tuple(object.slice()) : $B.$call(b.tuple, object));
        },

        PyLong_AsLong: number => Number(asLong(get(number), -I31 - 1n, I31)),
        PyLong_AsLongLong: number => asLong(get(number), -I63 - 1n, I63),
        PyLong_AsSize_t: number => Number(asLong(get(number), 0n, U32)) | 0,
        PyLong_AsUnsignedLong: number => Number(asLong(get(number), 0n, U32)) | 0,
        PyLong_AsUnsignedLongLong: number => asLong(get(number), 0n, U64),
        PyLong_FromLong: value => toC(value),
        PyLong_FromLongLong: value => toC(toInt(value)),
        PyLong_FromSize_t: value => toC(value >>> 0),
        PyLong_FromUnsignedLong: value => toC(value >>> 0),
        PyLong_FromUnsignedLongLong: value => toC(toInt(BigInt.asUintN(64, value))),
        PyBool_FromLong: value => toC(value !== 0),
        PyNumber_Index: number => toC($B.PyNumber_Index(get(number))),

        PyModuleDef_Init: definition => {
            addMethods(module, word(definition + 32), true);
            for (let at = word(definition + 36); word(at); at += 8) table.get(word(at + 4))(lend(module));
            return 0;
        },
        PyModule_AddFunctions: (_, at) => addMethods(module, at, true),
        PyModule_AddObjectRef: (_, name, object) => add(module, string(name), get(object)),
        PyModule_AddType: (_, type) => add(module, types.get(type).name, get(type)),

        PyObject_CallFunction: (called, pattern, values) =>
            toC($B.$call(get(called), ...build(`(${string(pattern)})`, reader(values)))),
        PyObject_CallMethod: (object, name, pattern, values) => toC(
            $B.$call($B.$getattr(get(object), string(name)), ...build(`(${string(pattern)})`, reader(values)))),
        PyObject_GC_UnTrack: () => {},
        PyObject_GetAttrString: (object, name) => {
            const of = get(object), read = of === module ? b.dict.$getitem : $B.$getattr;
            return toC(read(of, string(name)));
        },
        PyObject_IsTrue: object => +$B.$bool(get(object)),
        PyObject_SetAttrString: (object, name, value) =>
            ($B.$call(b.setattr, get(object), string(name), get(value)), 0),

        PyType_FromModuleAndSpec: (_, spec) => toC(makeType(spec)),
        PyType_GenericAlloc: type => {
            const {size, dealloc} = described(get(type)), at = allocate(size);
            const object = $B.$call(make_object, get(type));
            span(at, size).fill(0);
            setWord(at, 1);
            setWord(at + 4, type);
            objects.set(at, object);
            object.$address = at;
            gone.register(object, () => table.get(dealloc)(at));
            return at;
        },
        PyType_GetFlags: type => {
            const combine = (all, one, i) => all | b.issubclass(get(type), one) << 24 + i;
            if (!flags.has(type)) flags.set(type, FLAGGED.reduce(combine, 0));
            return flags.get(type);
        },
        PyType_GetModule: () => fixedAt(module),
        PyType_GetName: type => toC(nameOf(get(type))),
        PyType_GetSlot: (type, slot) => {
            if (slot === TP_FREE) return word(exports.free_pointer.value);
            if (slot === TP_DEALLOC) return types.get(type)?.dealloc ?? 0;
            const [base] = slot === TP_BASE && !types.has(type) ? get(type).tp_bases : [];
            return base ? fixedAt(base) : 0;
        },
        PyType_IsSubtype: (type, base) => +b.issubclass(get(type), get(base)),

        PyUnicode_AsUTF8AndSize: (object, length) =>
            lendText(typeof get(object) === "string" ? get(object) : $B.RAISE(b.TypeError, "expected str"), length),
        PyUnicode_CompareWithASCIIString: (object, at) => +(get(object) !== string(at)),
        PyUnicode_FromFormatV: (pattern, values) => toC(format(pattern, reader(values))),
        PyUnicode_FromString: at => toC(string(at)),
        PyUnicode_Split: (object, separator, most) => {
            const parts = get(object).split(get(separator));
            if (parts.length > most + 1) parts.push(parts.splice(most).join(get(separator)));
            return toC($B.$list(parts));
        },

        pthread_atfork: () => 0,
    };
    // An exception becomes C's, with the value that says so.
    const imports = {};
    for (const {module: from, name} of WebAssembly.Module.imports(wasm)) {
        const own = name.replace(/^_(.*)_SizeT$/, "$1"), work = python[own] ?? (() => { throw Error(`no ${own}`); });
        const isLong = /Long_As.*LongLong/.test(own), isNumber = /Long_As|Float_As|SetItem|SetAttr|IsTrue/.test(own);
        const failed = isLong ? -1n : isNumber ? -1 : 0;
        (imports[from] ??= {})[name] = (...given) => {
            try {
                return work(...given);
            } catch (raised) {
                error = $B.exception(raised);
                return failed;
            }
        };
    }
    exports = new WebAssembly.Instance(wasm, imports).exports;
    memory = exports.memory;
    table = exports.__indirect_function_table;
    fix(b.type, allocate(8));
    for (const name of ["None", "True", "False"])
        fix({None, True: true, False: false}[name], exports[`_Py_${name}Struct`].value);
    for (const [name, {value}] of Object.entries(exports)) {
        const [, exception, type] = name.match(/^PyExc_(\w+)|^Py(\w+)_Type$/) ?? [];
        if (exception) fix(b[exception], word(value));
        if (type) fix(b[NAMES[type] ?? type.toLowerCase()], value);
    }
    exports._initialize();
    exports.PyInit__core();
    return {module, call, read};
}
