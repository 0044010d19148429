"""The bounds of what clients may send, in one table; docs/serving.md explains them.

Bodies are counted before they are parsed, and lists are bounded before they are validated: a body
that is refused costs little more than its own bytes.
"""

from __future__ import annotations

#: Bytes of a body: an image of 24 MB in base64. ``serve --max-body`` sets another bound.
BODY = 32 << 20
#: Bytes of all bodies that are being received or parsed; bodies of up to SMALL may fill twice that.
BODIES, SMALL = 512 << 20, 1 << 20
#: Values of a body; of these, lists and objects and their keys; and escapes in strings.
VALUES, KEYS, ESCAPES = 1 << 20, 1 << 16, 1 << 20
#: Bytes of a string with other letters than ASCII's; images in base64 have none.
TEXT = 8 << 20
#: Characters of all parameters but prompts and messages; a value counts as VALUE of them.
PARAMETERS, VALUE = 1 << 20, 16

#: Prompts of a request, and tokens of a prompt or of a text to detokenize.
PROMPTS, TOKENS = 1024, 1 << 20
#: Messages of a chat, and parts, images and tool calls of a message.
MESSAGES, PARTS = 4096, 1024
#: Images of a request.
IMAGES = 64
TOOLS = 1024
#: Choices of a prompt. Those of all prompts are bounded by ``--n-sequences`` and ``--max-queue``.
N = 128
#: Stop strings (or sequence breakers of DRY), and characters of one.
STOPS, STOP = 16, 1000
#: Tokens with a bias.
BIASES = 1 << 16
#: Log probabilities of a token.
LOGPROBS = 20

#: Characters of an error's message.
MESSAGE = 2000

#: A request must be complete HEADERS_S seconds after its beginning, and a second later for each
#: BYTES_PER_S bytes of it that have come.
HEADERS_S, BYTES_PER_S = 20.0, 16 << 10
#: Connections whose request is not complete; of more than these, the oldest are closed.
UNFINISHED = 4096
