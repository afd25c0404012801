"""The prompts of the SmolLM2 golden: prose, code, other scripts, a chat, lists, and one of more than 600 tokens."""

from __future__ import annotations

LONG = """\
A weaver who works alone keeps two ledgers. The first is a list of orders: who asked for what, how long and how
wide, by which day, and what was paid in advance. The second is a list of threads. It says which spools are
full, which are nearly empty, where each colour was dyed, and how it behaved the last time it was washed. The
first ledger is for the customers, and it can be shown to anyone. The second is for the weaver, and it is the
more valuable of the two.

Threads are not alike, even when they have the same name. The blue from the spring dyeing is a little greener
than the blue from the autumn, because the water of the river changes with the snow that melts into it. A
careful buyer will not notice this on the spool. On the loom, where one hand's width of spring blue lies beside
one hand's width of autumn blue, everybody notices. So the weaver writes the season beside the colour and never
mixes the two in one cloth, unless the pattern asks for a border, and then the difference looks like a decision.

The loom itself has a ledger too, but it is written in the wood. Where the treadle has been pressed ten thousand
times there is a hollow in the shape of a foot. Where the shuttle strikes the box there is a dent, and a wedge
of felt that was put there to quiet the blow. A new weaver who sits down at an old loom learns the habits of the
last one before learning anything about cloth. The bench is too high or too low; the beater pulls to the left;
the third heddle sticks when the air is damp. None of these things is written anywhere, and each of them has a
reason.

When an apprentice comes, the lessons begin with mistakes. Here is a cloth with a missed thread: find it. Here
is one where the tension was lost in the middle of the day, because the sun came round and dried one side of the
warp before the other: show where the morning ends. Here is one that is perfect, and here is one that was mended
so well that it seems perfect: say which is which, and say how you know. The apprentice who can answer the last
question may be trusted with a shuttle. It takes some of them a week, and some of them a year, and one or two
have gone home to keep bees.

Pricing is the hardest part. A cloth that took nine days is not worth nine times the cloth that took one, and
the customer who pays the most is seldom the one who will use it the longest. The weaver has a rule, learned
from an aunt: count the days, add the thread, add a tenth for the loom, and then ask yourself whether you would
be glad to see this cloth again in twenty years. If the answer is yes, take a little off. If the answer is no,
add a little, and do better next time.

In the evening the weaver reads both ledgers by the window. The list of orders grows shorter from the top and
longer from the bottom. The list of threads is never finished.

Question: why does the weaver write the season beside the colour of a thread?
Answer:"""

PROMPTS = {
    "prose": "The lighthouse keeper counted the ships that passed in the night, and every morning",
    "code": "def binary_search(items, wanted):\n    low, high = 0, len(items) - 1\n"
    "    while low <= high:\n        middle =",
    "scripts": "Bonjour, 你好, здравствуйте, こんにちは 🌍🚀! In English, each of these words means",
    "chat": "<|im_start|>system\nYou answer in one sentence.<|im_end|>\n"
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "list": "Days of the week:\n1. Monday\n2. Tuesday\n3.",
    "long": LONG,
}
