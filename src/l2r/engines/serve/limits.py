"""Bounds on what a stranger may ask of the server, in one place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeLimits:
    """Sizes and times; times in seconds.

    ``context`` is the number of tokens of prompt and answer together, at most the model's own.
    ``requests`` are in flight, ``connections`` open, ``choices`` the answers of one request (its
    prompts times ``n``). ``unread`` are tokens of an answer that its client did not take: with
    more, and while others wait for their turn, the answer ends.
    """

    context: int = 2**20
    requests: int = 64
    connections: int = 256
    choices: int = 32
    head_seconds: float = 10  # until the head of a request is there
    body_seconds: float = 30  # until its body is
    take_seconds: float = 60  # until the client takes what was written
    unread: int = 64
    template_seconds: float = 5  # until a chat template has ended
    template_bytes: int = 2**30  # of memory of its process
    stall_seconds: float = 120  # of work without a token, after which /health says so

    @property
    def characters(self) -> int:
        """All prompts of a request together; more would be tokenized in vain."""
        return 16 * self.context

    @property
    def body(self) -> int:
        """Bytes: four for each character, and room for the other fields."""
        return 2**20 + 4 * self.characters
