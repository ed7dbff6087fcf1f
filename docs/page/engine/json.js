/* JSON for lib/json.py: Brython's parser takes seconds for the package's data. */
"use strict";

function makeJson($B) {
    const b = $B.builtins, TOKEN = /\s*(?:([{}[\],:])|"((?:[^"\\]|\\.)*)"|(-?\d[\d.eE+-]*)|(true|false|null))/y;
    const WORDS = {true: true, false: false, null: b.None};

    const number = text => {
        if (/[.eE]/.test(text)) return $B.fast_float(Number(text));
        return Number.isSafeInteger(Number(text)) ? Number(text) : BigInt(text);
    };

    function loads(text) {
        TOKEN.lastIndex = 0;
        const next = () => TOKEN.exec(text) ?? $B.RAISE(b.ValueError, "not JSON");
        const value = ([, mark, string, digits, word]) => {
            if (string !== undefined) return string.includes("\\") ? JSON.parse(`"${string}"`) : string;
            if (digits !== undefined) return number(digits);
            if (word !== undefined) return WORDS[word];
            const list = [], dict = mark === "{" ? $B.empty_dict() : null;
            for (let token = next(); token[1] !== "]" && token[1] !== "}"; token = next()) {
                if (token[1] === ",") continue;
                const one = value(token);
                if (!dict) list.push(one);
                else {
                    next(); // the colon
                    b.dict.$setitem(dict, one, value(next()));
                }
            }
            return dict ?? $B.$list(list);
        };
        return value(next());
    }

    const escape = c => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0");
    const quote = text => JSON.stringify(text).replace(/[\u007f-\uffff]/g, escape);

    function dumps(made) {
        if (made === b.None) return "null";
        if (typeof made === "string") return quote(made);
        if (typeof made === "boolean" || typeof made === "number" || typeof made === "bigint") return String(made);
        if ($B.is_list(made) || $B.is_tuple(made)) return `[${made.map(dumps).join(", ")}]`;
        if (!$B.$isinstance(made, b.dict)) return b.repr(made); // a float
        const items = Array.from(b.dict.$iter_items(made), ({key, value}) => `${quote(key)}: ${dumps(value)}`);
        return `{${items.join(", ")}}`;
    }

    return {loads, dumps};
}
