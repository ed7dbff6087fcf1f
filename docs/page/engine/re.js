/* Python's regular expressions by JavaScript's: lib/re.py. */
"use strict";

function makeRe($B) {
    const I = 2, M = 8, S = 16, X = 64, END = "(?![^])";
    const SPELT = {"\\A": "(?<![^])", "\\Z": END, "\\z": END, "(?P<": "(?<"};
    const PIECE = /\\[^]|\[\^?\]?(?:\\[^]|[^\]\\])*\]|\(\?P<|\$/g;
    const VERBOSE = new RegExp(PIECE.source + "|\\s+|#.*", "g");

    // Return three expressions for a pattern: it is searched for, it matches where it is tried, it matches to the end.
    function compile(pattern, flags) {
        pattern = pattern.replace(/^\(\?([aimsx]+)\)/, (_, letters) => {
            for (const letter of letters) flags |= {a: 0, i: I, m: M, s: S, x: X}[letter];
            return "";
        });
        const source = pattern.replace(flags & X ? VERBOSE : PIECE, piece => {
            if (/^(\s|#)/.test(piece)) return "";
            if (piece === "$" && !(flags & M)) return `(?=\\n?${END})`;
            return SPELT[piece] ?? piece.replace(/^(\[\^?)\]/, "$1\\]");
        });
        const letters = (flags & I ? "i" : "") + (flags & M ? "m" : "") + (flags & S ? "s" : "");
        const kinds = [[source, "g"], [source, "y"], [`(?:${source})${END}`, "y"]];
        return $B.fast_tuple(kinds.map(([text, kind]) => ({expression: new RegExp(text, letters + kind)})));
    }

    // Return where a match begins, its groups and its named groups.
    function find({expression}, text, start) {
        const {None, dict} = $B.builtins, names = $B.empty_dict();
        expression.lastIndex = start;
        const found = expression.exec(text);
        if (!found) return None;
        for (const [name, group] of Object.entries(found.groups ?? {})) dict.$setitem(names, name, group ?? None);
        return $B.fast_tuple([found.index, $B.$list(Array.from(found, group => group ?? None)), names]);
    }

    return {compile, find};
}
