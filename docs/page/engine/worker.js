/* Answers the page's questions: Brython runs the package's Python, WebAssembly its C. */
"use strict";

importScripts("brython.js", "capi.js", "re.js", "json.js", "library.js");

const texts = new Map();

// Return the text of one of the package's data files. Those that few answers need are fetched when they are needed.
function read(name) {
    if (!texts.has(name)) {
        const request = new XMLHttpRequest();
        request.open("GET", name, false); // a worker may wait
        request.send();
        texts.set(name, request.responseText);
    }
    return texts.get(name);
}

// Keep the files of data.json: lines, and for each file the steps from one to the next (build.py).
function unpack({lines, files}) {
    for (const [name, steps] of Object.entries(files)) {
        let at = 0;
        texts.set(name, steps.map(step => lines[at += step]).join("\n"));
    }
}

// Python rounds the exact half of a digit to the even one.
const {toFixed} = Number.prototype;
Number.prototype.toFixed = function (digits = 0) {
    const twice = this * 2 * 10 ** digits, isHalf = Number.isInteger(this * 2 ** (digits + 1)) && twice % 2;
    return toFixed.call(isHalf ? 2 * Math.round(twice / 4) / 10 ** digits : this, digits);
};

async function load() {
    const core = fetch("core.wasm").then(answer => answer.arrayBuffer());
    const data = fetch("data.json").then(answer => answer.json());
    const wasm = await WebAssembly.compile(await core);
    unpack(await data);
    const $B = __BRYTHON__;
    let python;
    self.engine = {
        ...makeRe($B),
        ...makeJson($B),
        start(...helpers) {
            python = makeCore($B, wasm, ...helpers);
            return python.module;
        },
        call: (...given) => python.call(...given),
        read: (...given) => python.read(...given),
        data: read,
        names: folder => $B.$list(DATA.filter(name => name.startsWith(folder + "/"))
            .map(name => name.slice(folder.length + 1)).filter(name => !name.includes("/"))),
    };
    $B.runPythonSource("import ask, vaemem.prediction.predict_vae, vaemem.pipelines.predict_pipeline", {name: "main"});
    return text => $B.$call($B.module_getattr($B.imported.ask, "ask"), text);
}

// Return the text of an error, JavaScript's or Python's.
const say = raised => raised.ob_type ? __BRYTHON__.error_trace(raised) : String(raised);

const loading = load();
loading.then(() => postMessage({ready: true}), raised => postMessage({failed: say(raised)}));
addEventListener("message", async ({data: {id, text}}) => {
    const ask = await loading;
    try {
        postMessage({id, text: ask(text)});
    } catch (raised) { // ask catches what Python raises: this is a fault of the engine's
        console.error(say(raised));
        postMessage({id, text: JSON.stringify({error: "The calculator has a fault here.", argument: ""})});
    }
});
