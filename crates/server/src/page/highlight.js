// Code as coloured nodes: comments, strings, numbers, words of the language. Enough to read by, no grammar.

const words = (text) => new Set(text.split(" "));
const C_LIKE = "break case catch class const continue default do else enum false for if new null private protected public return static switch this throw true try void while";
const HASH = "#[^\\n]*";
const SLASHES = "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";

/// What a comment is, and the words; languages by all names that fences use.
const LANGUAGES = [
  ["python py", HASH, "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not or pass raise return self True try while with yield"],
  ["javascript js jsx typescript ts tsx mjs", SLASHES, C_LIKE + " any async await boolean export extends finally from function import in instanceof interface let number of string super type typeof undefined var yield"],
  ["rust rs", SLASHES, "as async await bool break const continue crate dyn else enum extern f32 f64 false fn for i32 i64 if impl in let loop match mod move mut None Ok Err Some pub ref return self Self static str String struct super trait true type u8 u32 u64 unsafe use usize Vec where while"],
  ["c h cpp c++ cc hpp java kotlin csharp cs c#", SLASHES, C_LIKE + " auto bool boolean char double extends final float import include int interface long namespace nullptr override package short sizeof string struct template typedef typename unsigned using var virtual"],
  ["go golang", SLASHES, "break case chan const continue default defer else error fallthrough false for func go if import int interface map nil package range return select string struct switch true type var"],
  ["bash sh shell zsh console", HASH, "case cd do done echo elif else esac exit export fi for function if in local return set source sudo then while"],
  ["json jsonc json5", SLASHES, "true false null"],
  ["yaml yml toml ini", HASH, "true false null yes no"],
  ["sql", "--[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)", "add all alter and as asc between by case create delete desc distinct drop else end exists from full group having in index inner insert into is join key left like limit not null on or order outer primary right select set table then union update values when where with"],
  ["css scss", "\\/\\*[^]*?(?:\\*\\/|$)", "important"],
  ["html xml svg", "<!--[^]*?(?:-->|$)", ""],
];
const STRING = '"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)|"(?:[^"\\\\\\n]|\\\\[^])*"?|`(?:[^`\\\\]|\\\\[^])*`?|';
const QUOTED = "'(?:[^'\\\\\\n]|\\\\[^])*'";
/// Rust's single quotes stand alone before lifetimes.
const CHARACTER = "'(?:[^'\\\\\\n]|\\\\[^'\\n]{1,9})'";
/// Longer code is shown without colours: nobody reads it for them, and drawing it would hold the page up.
const MOST_CHARS = 60_000;

const known = new Map();
for (const [names, comment, list] of LANGUAGES) {
  const [sql, rust] = [names === "sql", names === "rust rs"];
  const language = {
    pattern: new RegExp("(" + comment + ")|(" + STRING + (rust ? CHARACTER : QUOTED) + ")|\\b(\\d[\\w.]*)|([A-Za-z_$][\\w$]*)", "g"),
    isWord: ((set) => (word) => set.has(sql ? word.toLowerCase() : word))(words(list)),
  };
  for (const name of names.split(" ")) known.set(name, language);
}

/** Nodes with the text of `code`, all of it. */
export function highlight(code, name) {
  const language = known.get(name.toLowerCase());
  if (!language || code.length > MOST_CHARS) return [code];
  const nodes = [];
  let done = 0;
  for (const match of code.matchAll(language.pattern)) {
    const kind = match[1] ? "comment" : match[2] ? "string" : match[3] ? "number" : language.isWord(match[4]) ? "word" : "";
    if (!kind) continue;
    const node = document.createElement("span");
    node.className = "code-" + kind;
    node.textContent = match[0];
    nodes.push(code.slice(done, match.index), node);
    done = match.index + match[0].length;
  }
  nodes.push(code.slice(done));
  return nodes;
}
