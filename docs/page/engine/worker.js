/* Answers the page's questions: Brython runs the package's Python, WebAssembly its C. */
"use strict";

importScripts("brython.js", "capi.js", "re.js", "library.js");

const texts = new Map();

// The text of one of the package's data files, fetched when it is first needed.
function read(name) {
    if (!texts.has(name)) {
        const request = new XMLHttpRequest();
        request.open("GET", name, false); // a worker may wait
        request.send();
        texts.set(name, request.status === 200 ? request.responseText : null);
    }
    return texts.get(name);
}

async function load() {
    const wasm = await WebAssembly.compile(await (await fetch("core.wasm")).arrayBuffer());
    const $B = __BRYTHON__, b = $B.builtins;
    let core;
    self.engine = {
        ...makeRe($B),
        start(ndarray, caller, getter, make_type, make_exception, allocate, copy_dict, items, import_module, index) {
            core = makeCore($B, wasm, {ndarray, caller, getter, make_type, make_exception, allocate, copy_dict, items,
                                       import_module, index});
            core.start();
            const names = $B.empty_dict();
            for (const [name, object] of Object.entries(core.module)) b.dict.$setitem(names, name, object);
            return names;
        },
        call: (...given) => core.call(...given),
        read: (...given) => core.read(...given),
        tolist: array => core.tolist(array),
        data: name => read(name) ?? $B.RAISE(b.FileNotFoundError, name),
        names: folder => $B.$list(DATA.filter(name => name.startsWith(folder + "/"))
            .map(name => name.slice(folder.length + 1))),
    };
    $B.runPythonSource("import ask, vaemem.prediction.predict, vaemem.pipelines.predict_pipeline", {name: "main"});
    return text => $B.$call($B.module_getattr($B.imported.ask, "ask"), text);
}

const loading = load();
loading.then(() => postMessage({ready: true}), error => postMessage({failed: String(error)}));
addEventListener("message", async ({data: {id, text}}) => {
    const ask = await loading;
    try {
        postMessage({id, text: ask(text)});
    } catch (raised) { // ask catches what Python raises: this is a fault of the engine's
        console.error(raised.ob_type ? __BRYTHON__.error_trace(raised) : raised);
        postMessage({id, text: JSON.stringify({error: "The calculator has a fault here.", argument: ""})});
    }
});
