"""The texts that tokenizers are compared on, and access to the goldens that `make_tokenizer_golden.py` writes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

CODE = [
    "def add(a, b):\n    return a + b\n",
    "class Foo(Bar):\n\tdef __init__(self):\n\t\tself.x = [i**2 for i in range(10)]\n",
    'for (int i = 0; i < 10; ++i) { printf("%d\\n", a[i]); }',
    "#include <stdio.h>\r\nint main(void)\r\n{\r\n    return 0x7fff;\r\n}\r\n",
    'fn main() { let x: &\'static str = "hi"; println!("{x:?}"); }',
    '{"key": [1, 2.5e-3, null, true], "nested": {"a\\u00e9": "\\n"}}',
    "SELECT * FROM t WHERE a >= 10 AND b <> 'it''s' -- comment",
    '<div class="a b">&nbsp;<br/>text</div>',
    "x = y if z else w  # TODO: fix\n\n\n\nassert x != 3.14159",
    "git commit -m 'fix: off-by-one' && git push --force-with-lease",
    "a=b;c=d;e+=f;g->h();i::j<k>();l%=m;n<<=2;o>>>3;!p;~q;r&&s||t^u",
    "lambda *args, **kwargs: print(*args, sep=', ', **kwargs)",
    "\\frac{\\partial f}{\\partial x} = \\sum_{i=1}^{n} \\alpha_i x_i^2",
    "https://example.org/path/to?query=1&other=a%20b#frag",
    "if (a) {\n        b();\n    } else if (c)\n  d();\n",
    "```python\nprint('x')\n```\n",
    'val x = """multi\nline""".trimIndent()',
    "$HOME/.config/foo_bar-baz.TOML:12:34: error[E0308]",
]

PROSE = [
    "Once upon a time, there was a little girl who lived in a village near the forest.",
    "I'm sure they'll say we've done it, she'd think it's theirs; don't you? YOU'RE right, I'LL go, it'S.",
    'Dr. Smith\'s e-mail (smith@example.com) said: "Call me at 9 a.m.!"',
    "naïve café façade coöperate Ünïcödé ﬁle straße ŒUVRE",
    "Zażółć gęślą jaźń. Příliš žluťoučký kůň. Árvíztűrő tükörfúrógép.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "שלום עולם, מה שלומך?",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "สวัสดีชาวโลก",
    "Xin chào thế giới, bạn có khỏe không?",
    "İstanbul'da ığdır ŞĞÜ",
    "የኢትዮጵያ ሕዝብ",
    "ქართული ენა",
    "a",
    " a",
    "a ",
    "",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "Hello,world!How are you?Fine.",
    "user's users' ''' ' 's 't'x 've",
]

CJK = [
    "你好，世界！今天天气很好。",
    "日本語のテキスト、ひらがなとカタカナと漢字。",
    "안녕하세요 세계, 오늘 날씨가 좋네요.",
    "中文English混合text和123数字",
    "「引用」『二重』【括弧】（全角）",
    "ＡＢＣ１２３ｆｕｌｌｗｉｄｔｈ　space",
    "𠀀𠀁𪚥 rare han",
    "ｶﾀｶﾅ half",
    "한글 자모 ㄱㄴㄷ",
    "龘靐齉",
]

EMOJI = [
    "a\n🦙",
    "🦙",
    "🦙🦙🦙 llama",
    "👩‍👩‍👧‍👦 family",
    "👍🏽 thumbs 👍🏿",
    "🇩🇪🇯🇵 flags",
    "☺️ ☺ ✔︎ ✔️",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿 tags",
    "text🙂text 🙂 text",
    "🤖💬🔥✨🎉",
    "1️⃣2️⃣ #️⃣",
    "❤️‍🔥 and ♥",
]

COMBINING = [
    "e\u0301 vs \u00e9",
    "a\u0308o\u0308u\u0308 A\u030a",
    "Z\u0351\u036b\u0343a\u0300\u0301\u0302\u0303l\u0334g\u0321o\u0489",
    "n\u0303a\u0303o",
    "\u0301alone",
    "\u1100\u1161\u11a8 jamo",
    "क\u094dष\u093f",
    "\u200fright\u200e to left",
    "zero\u200bwidth\u200cjoin\u200der\ufeff",
    "s\u0323\u0307 s\u0307\u0323 \u1e69",
    "\u212b \u2126 \u1e9b\u0323",
]

WHITESPACE = [
    " ",
    "  ",
    "   ",
    " " * 7,
    " " * 16,
    " " * 33,
    "\t",
    "\t\t\t",
    "\n",
    "\n\n",
    "\n\n\n\n",
    "\r\n",
    "\r\n\r\n",
    "\r",
    " \n",
    "\n ",
    " \n ",
    "  \n  \n",
    "\t \t ",
    "x ",
    "x  ",
    "x   y",
    "x\ty",
    "x\n\n  y",
    "  x",
    "    x = 1\n        y = 2\n",
    "a\u00a0b\u00a0\u00a0c",
    "a\u2003b\u2009c\u3000d",
    "line\u2028sep\u2029par\x85nel",
    "a\x0bb\x0cc",
    "trailing   \n   leading",
    " \t\n\r\x0b\x0c ",
    "end with newline\n",
    "\n\n\nstart",
    "a \n b \n\n c  \n\n\n d",
]

NUMBERS = [
    "3333+777\n\n  x",
    "0",
    "1234567890",
    "3.14159",
    "1,000,000.00",
    "1e-10",
    "0xDEADBEEF",
    "2024-01-31T12:34:56Z",
    "x1y22z333",
    "a 7",
    "a  7",
    "a   77",
    "\n\n7",
    " \t7",
    "x = [\n    1,\n    22,\n]",
    "1. one\n2. two\n\n10. ten",
    "½ ¾ ² ³ ⅷ Ⅻ ① ㊿",
    "٠١٢٣ ०१२३ ๑๒๓ 𝟘𝟙𝟚",
    "99 bottles, 98 bottles",
    "+1 (555) 123-4567",
    "10% of $5.00 = €0.50",
    "v1.2.3-rc.4+build.567",
    "1/2 3:4 5x6 7×8",
    "4'33\" 5's",
    "一二三 12三",
]

SPECIALS = [
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "<|endoftext|><|endoftext|>",
    "a<|im_end|>b",
    "a <|im_end|> b",
    "<|im_start|><|im_start|>",
    "<|im_start",
    "|im_start|>",
    "<|im_start|",
    "<<|im_end|>>",
    "<|IM_END|>",
    "<|im_end|><repo_name>x<reponame>y<file_sep>z",
    "<filename>a.py<gh_stars>100<issue_start><issue_comment>c<issue_closed>",
    "<jupyter_start><jupyter_text>t<jupyter_code>c<jupyter_output>o<jupyter_script><empty_output>",
    "\u200b<|im_end|>",
    "🦙<|im_end|>🦙",
    "7<|im_end|> 7",
    "<s>[INST] hi",
    "<s>[INST] hi [/INST] yes </s><s>[INST] more [/INST]",
    "<unk> <pad> [UNK] [PAD] <0x0A>",
]

INVALID = [
    bytes.fromhex(data).decode("utf-8", "replace")
    for data in (
        "ff",
        "61ff62",
        "c3",
        "c328",
        "e282",
        "f09fa6",
        "f09fa661",
        "f0288cbc",
        "eda080",  # a surrogate
        "c080",  # overlong
        "f4908080",  # beyond U+10FFFF
        "80bf",
        "fffe6100",
        "6162c3a9e9",
    )
] + [
    "\ufffd",
    "a\ufffd\ufffdb",
    "\x00",
    "a\x00b",
    "\x01\x02\x03\x7f",
    "tab\x04eot\x06ack\x13\x14\x16\x1d",  # bytes that SmolLM2's vocabulary lacks
    "\ufffe\uffff",
    "\ue000\uf8ff private",
    "\U000e0001\U000f0000\U0010ffff",
    "\U00040000",
    "\u0378 unassigned \U0003fffd",
]

_FRAGMENTS = (
    *("the", " The", "ing", " foo", "Bar", "x", " = ", "==", "(", ")", "[]", "{}", ";", ":", ",", ".", "!", "?", "'s"),
    *("'", '"', "_", "-", "--", "/", "\\", "#", "@", "$", "%", "&", "*", "+", "<", ">", "<|", "|>", "1", "22", "333"),
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "é", "e\u0301", "ß", "Ж", "の", "漢字", "한", "ع", "🦙", "👍🏽"),
    *("\u200d", "\u00a0", "\ufffd", "<|im_end|>", "<|im_start|>", "²", "Ⅷ", "٣"),
)


def _mixtures(count: int) -> list[str]:
    draw = random.Random(20240131)
    return ["".join(draw.choices(_FRAGMENTS, k=draw.randint(2, 24))) for _ in range(count)]


TEXTS: list[str] = list(
    dict.fromkeys(
        [
            *CODE,
            *PROSE,
            *CJK,
            *EMOJI,
            *COMBINING,
            *WHITESPACE,
            *NUMBERS,
            *SPECIALS,
            *INVALID,
            *_mixtures(130),
            "\n".join(CODE + PROSE),
        ]
    )
)


RUNS = ("  ", "    ", " " * 16, "\n\n", "\n" * 4, "\t\t")
"""User-defined tokens of the golden "runs"."""


def load(name: str) -> dict[str, Any]:
    """The golden tokenizer_NAME.json."""
    return json.loads((FOLDER / f"tokenizer_{name}.json").read_text("ascii"))


def save(name: str, golden: dict[str, Any]) -> None:
    """Write it: ASCII, and lists item by item, so that a change shows as one line."""
    lines = []
    for key, value in golden.items():
        if isinstance(value, list):
            items = ",\n".join(json.dumps(item, separators=(",", ":")) for item in value)
            lines.append(f"{json.dumps(key)}: [\n{items}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}")
    (FOLDER / f"tokenizer_{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "ascii")
