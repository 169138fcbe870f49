"""Responses that later ones go on from: the newest, in this process's memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.runtime.serve.errors import ApiError

_MOST_BYTES = 64 << 20
"""Of all inputs and answers together, as JSON."""


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to its end."""

    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    """The request's own input."""
    messages: Sequence[Mapping[str, Any]]
    """As chats have them, without instructions: those of a request are its own."""
    num_bytes: int


class ResponseStore:
    """The newest responses, by id; changed in the event loop, read by any thread."""

    def __init__(self, most: int) -> None:
        """`most`: responses; 0: nothing is stored."""
        self.most = most
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, tuple[str, Mapping[str, Any]]] = {}
        """By their own ids: items of answers, and whose they are."""
        self._num_bytes = 0

    def put(
        self,
        response: Mapping[str, Any],
        items: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store a response; the oldest ones make room."""
        size = len(json.dumps([response["output"], items]))
        stored = StoredResponse(response, items, messages, size)
        self._stored[response["id"]] = stored
        self._items |= {item["id"]: (response["id"], item) for item in response["output"]}
        self._num_bytes += size
        while len(self._stored) > self.most or self._num_bytes > _MOST_BYTES:
            self._forget(next(iter(self._stored)))

    def get(self, response_id: str, *, field: str | None = None) -> StoredResponse:
        """Return a stored response; `ApiError` for others. `field` of a request names it."""
        found = self._stored.get(response_id)
        if found is not None:
            return found
        if field is None:
            raise ApiError(404, f"no response {response_id!r:.100} is stored{self._why()}")
        raise ApiError(
            400,
            f"'{field}': no response {response_id!r:.100} is stored{self._why()}; send the whole "
            "input instead",
            param=field,
            code="previous_response_not_found",
        )

    def item(self, item_id: str) -> Mapping[str, Any]:
        """Return an item of a stored answer; `ApiError` for others."""
        if item_id not in self._items:
            raise ApiError(
                400,
                f"'input': no item {item_id!r:.100} is stored{self._why()}; send the item itself",
                param="input",
            )
        return self._items[item_id][1]

    def delete(self, response_id: str) -> None:
        """Forget a response; `ApiError` if it is not there."""
        self.get(response_id)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        self._num_bytes -= stored.num_bytes
        for item in stored.response["output"]:
            if self._items.get(item["id"], ("",))[0] == response_id:
                del self._items[item["id"]]

    def _why(self) -> str:
        if not self.most:
            return " (nothing is, with --max-stored-responses 0 or --replicas)"
        return f" (the newest {self.most} are, --max-stored-responses, while the server runs)"
