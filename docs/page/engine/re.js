/* Python's regular expressions by JavaScript's: lib/re.py. */
"use strict";

function makeRe($B) {
    const b = $B.builtins, I = 2, M = 8, S = 16, X = 64;

    const ENDS = {A: "(?<![^])", Z: "(?![^])", z: "(?![^])"};

    // JavaScript's source and flags for a pattern of Python's.
    function translate(pattern, flags) {
        pattern = pattern.replace(/^\(\?([aiLmsux]+)\)/, (_, letters) => {
            for (const letter of letters) flags |= {i: I, m: M, s: S, x: X}[letter] ?? 0;
            return "";
        });
        let source = "", inSet = false;
        for (let i = 0; i < pattern.length; i++) {
            const c = pattern[i], rest = pattern.slice(i);
            if (c === "\\") {
                i++;
                source += !inSet && ENDS[pattern[i]] || c + pattern[i];
            } else if (inSet) {
                if (c === "]") inSet = false;
                source += c === "[" ? "\\[" : c;
            } else if (c === "[") {
                inSet = true;
                source += c;
                if (pattern[i + 1] === "^") source += pattern[++i];
                if (pattern[i + 1] === "]") source += "\\" + pattern[++i];
            } else if (rest.startsWith("(?P<")) {
                source += "(?<";
                i += 3;
            } else if (rest.startsWith("(?P=")) {
                const end = pattern.indexOf(")", i);
                source += `\\k<${pattern.slice(i + 4, end)}>`;
                i = end;
            } else if (c === "$" && !(flags & M)) source += "(?=\\n?(?![^]))";
            else if (flags & X && /\s/.test(c)) continue;
            else if (flags & X && c === "#") while (i + 1 < pattern.length && pattern[i + 1] !== "\n") i++;
            else source += c;
        }
        return [source, (flags & I ? "i" : "") + (flags & M ? "m" : "") + (flags & S ? "s" : "")];
    }

    function compile(pattern, flags) {
        const [source, letters] = translate(pattern, flags), names = $B.empty_dict();
        const pieces = source.matchAll(/\\.|\[(?:\\.|[^\]])*\]|\((?!\?(?!<[^=!]))(?:\?<(\w+)>)?/g);
        const groups = [...pieces].filter(([all]) => all[0] === "("); // not escaped, not in a set
        groups.forEach(([, name], i) => name && b.dict.$setitem(names, name, i + 1));
        const both = text => ["g", "y"].map(kind => new RegExp(text, letters + kind + "d"));
        return $B.fast_tuple([names, {both: both(source)}, {both: both(`(?:${source})(?![^])`)}]);
    }

    function match({both}, text, start, sticky) {
        const expression = both[+sticky];
        expression.lastIndex = start;
        const found = expression.exec(text);
        if (!found) return b.None;
        return $B.$list(Array.from(found.indices, span => span ? $B.fast_tuple([...span]) : b.None));
    }

    return {compile, match};
}
