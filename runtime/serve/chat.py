"""/v1/chat/completions: conversations by the model's template, tools, text that fits a schema."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from llmpq.runtime.entrypoints.response_stream import ResponseStream
from llmpq.runtime.requests.request_output import Logprob
from llmpq.runtime.serve.answering import DONE, event
from llmpq.runtime.serve.bodies import ChatBody, Message, NamedTool, unknown_tool
from llmpq.runtime.serve.completions import LEAST_LOGPROB, prompt_scores
from llmpq.runtime.serve.errors import ApiError
from llmpq.runtime.serve.parsers.forced import ForcedReader, forced_guide
from llmpq.runtime.serve.parsers.parts import Parts
from llmpq.runtime.serve.parsers.reading import AnswerForm, Reader
from llmpq.runtime.serve.service import Choice, Service, usage
from llmpq.runtime.text import conversation
from llmpq.runtime.text.answer_text import Decoder

_BUDGET = "thinking_token_budget"
_OF_MESSAGES = {
    "role",
    "name",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
    "refusal",
    "tool_calls",
    "function_call",
}
"""What a message has beside its content."""


class Chat:
    """One request of /v1/chat/completions."""

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        *,
        format_field: str = "response_format",
        budget_field: str = _BUDGET,
    ) -> None:
        """The fields: what the client calls `response_format` and `thinking_token_budget`."""
        service.check_model(body.model)
        self._service, self._body = service, body
        self._budget_field = budget_field
        self._forced = self._forced_tools()
        self._form = AnswerForm()
        """How the answer's thoughts and calls are written, once the model is loaded."""
        self._in_thought = False
        """Whether the prompt has opened a thought."""
        if body.top_logprobs and body.logprobs is False:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true", param="top_logprobs")
        wanted = body.logprobs or body.top_logprobs  # the second alone asks for the first
        self._most = (body.top_logprobs or 0) if wanted else None
        self._guided_by, guide = self._guide()
        if guide is not None:
            body.structured_outputs = guide
        if self._guided_by == "response_format":
            self._guided_by = format_field
        limit = body.max_completion_tokens
        limit = body.max_tokens if limit is None else limit
        limit = service.default_max_tokens if limit is None else limit
        if limit is not None and limit < 1:
            message = f"max_tokens must be at least 1, got {limit}"
            raise ApiError(400, message, param="max_tokens")
        self.params = body.params(
            max_tokens=limit,
            logprobs=self._most,
            tokens_of=service.tokens_of,
            defaults=service.default_sampling,
        )
        self._tools = self._offered()
        """What the template shows; made here, as all that takes long for many of them."""
        functions = [tool.function.model_dump() for tool in body.tools or []]
        self._functions = functions if self._tools else []
        self._length = conversation_length(body.messages, self._tools, body.chat_template_kwargs)
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or service.model_name,
        }

    async def begin(self) -> list[ResponseStream]:
        """Queue the conversation."""
        body, service = self._body, self._service
        service.ready()
        self._form = service.answer_form(tools=self._tools is not None)
        # Marks that are special tokens must be in the text that is read.
        shown = service.tokenizer.names_special(self._form.marks)
        params = replace(self.params, skip_special_tokens=False) if shown else self.params
        if params.structured_outputs is not None and self._separates:
            after = replace(params.structured_outputs, after_thought=True)
            params = replace(params, structured_outputs=after)
        try:
            return await service.begin(
                [self._prompted],
                params,
                priority=body.priority,
                cache_salt=body.cache_salt,
                guided_by=self._guided_by,
                tools=self._tools is not None,
            )
        except ValueError as error:
            name, said = self._budget_field, str(error)
            if name == _BUDGET or not said.startswith(_BUDGET):
                raise
            param = name.partition(".")[0]
            raise ApiError(400, name + said.removeprefix(_BUDGET), param=param) from None

    async def _prompted(self) -> list[int]:
        cut = self.params.truncate_prompt_tokens is not None
        tokens = await self.prompt(room=None if cut else self._service.ready().max_model_len)
        end = "".join(map(self._service.tokenizer.text_of, tokens[-8:]))
        self._in_thought = self._form.opens_thought(end)
        if self._in_thought and self.params.structured_outputs is not None:
            # A guide waits for the end of a thought whose mark is one token
            # (text/request_factory.py).
            mark = "" if self._form.thinking is None else self._form.thinking.end
            one = len(self._service.tokenizer.encode(mark, special=False)) == 1
            self._in_thought = one and self._separates
        return tokens

    async def prompt(self, room: int | None = None) -> list[int]:
        """Return the conversation's tokens; `room`: how many it may have."""
        self._service.ready()
        return await self._service.read_text(partial(self._tokens, room), self._length)

    def _tokens(self, room: int | None) -> list[int]:
        return self._service.encode_chat(
            [plain_message(message) for message in self._body.messages],
            room=room,
            tools=self._tools,
            add_generation_prompt=self._body.add_generation_prompt,
            continue_final_message=self._body.continue_final_message,
            options=self._body.template_options(),
        )

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        begun = await self.begin()
        choices = await self._service.gather(begun, self.params.n)
        answered = sum(len(choice.token_ids) for choice in choices)
        answers = [self._choice(choice) for choice in choices]
        thoughts = [choice["message"].get("reasoning_content", "") for choice in answers]
        used = usage(len(begun[0].prompt_token_ids), answered, choices[0].num_cached_tokens)
        if not self._body.include_reasoning:
            for choice in answers:
                choice["message"].pop("reasoning_content", None)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": answers,
            "usage": used | await self._details(thoughts, [c.token_ids for c in choices]),
            **self._prompt_ids(begun),
            **prompt_scores(self._body, begun[0]),
        }

    async def events(self, begun: list[ResponseStream]) -> AsyncIterator[str]:
        """Yield the answer as it comes: roles first, then text or calls, then how it ended."""
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        running = options is not None and options.continuous_usage_stats
        head = {**self._head, "object": "chat.completion.chunk"}
        none = {"usage": None} if with_usage else {}
        for index in range(self.params.n):
            role = {"role": "assistant"}
            if self._body.echo:
                role["content"] = self._echo()
            elif not self._may_call:  # the content of calls alone is null
                role["content"] = ""
            ids = self._prompt_ids(begun) if index == 0 else {}
            yield event({**head, **none, "choices": [_part(index, role)], **ids})
        used = usage(len(begun[0].prompt_token_ids), 0)
        async with aclosing(self.parts(begun)) as parts:
            async for part, used in parts:
                now = {"usage": used} if running else none
                yield event({**head, **now, "choices": [part]})
        end = event({**head, "choices": [], "usage": used}) if with_usage else ""
        yield end + DONE

    async def parts(
        self, begun: list[ResponseStream], *, streamed: bool = True
    ) -> AsyncGenerator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield what is new of each answer, and what all took so far; `streamed`: it is sent."""
        n, answered, length = self.params.n, 0, len(begun[0].prompt_token_ids)
        cached = 0
        readers = [self._reader() for _ in range(n)]
        thoughts, ids_of = [""] * n, [list[int]() for _ in range(n)]
        called, sent = [False] * n, [False] * n
        async with aclosing(self._service.choices(begun, n, streamed=streamed)) as choices:
            async for new in choices:
                answered += len(new.token_ids)
                ids_of[new.index] += new.token_ids
                ended = new.finish_reason is not None
                cut = new.finish_reason == "length"
                deltas = readers[new.index].push(new.text, ended=ended, cut=cut)
                called[new.index] |= any("tool_calls" in delta for delta in deltas)
                thoughts[new.index] += "".join(d.get("reasoning_content", "") for d in deltas)
                if not self._body.include_reasoning:
                    deltas = [delta for delta in deltas if "reasoning_content" not in delta]
                logprobs = self._logprobs(new)
                ids = self._ids(new)
                if not deltas and (new.logprobs or ids.get("token_ids")):
                    deltas = [{"content": ""}]
                cached += new.num_cached_tokens if new.index == 0 else 0
                used = usage(length, answered, cached)
                for delta in deltas:
                    yield {**_part(new.index, delta, logprobs), **ids}, used
                    logprobs, ids = None, {}
                    sent[new.index] = True
                if ended:
                    if self._may_call and self._forced is None and not sent[new.index]:
                        yield _part(new.index, {"content": ""}), used
                    reason = self._reason(new, called[new.index])
                    used |= await self._details(thoughts, ids_of)
                    yield _part(new.index, {}, None, reason, new.stop_reason), used

    def _choice(self, choice: Choice) -> dict[str, Any]:
        cut = choice.finish_reason == "length"
        deltas = self._reader().push(choice.text, ended=True, cut=cut)
        content = "".join(delta.get("content", "") for delta in deltas)
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        if self._body.echo:
            content = self._echo() + content
        nothing = None if calls or thought or self._forced is not None else ""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or nothing,
            "refusal": None,
        }
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": self._reason(choice, bool(calls)),
            "stop_reason": choice.stop_reason,
            **self._ids(choice),
        }

    def _echo(self) -> str:
        """Return the text that the answer goes on with."""
        return str(plain_message(self._body.messages[-1])["content"])

    def _ids(self, choice: Choice) -> dict[str, Any]:
        """Return the tokens of an answer, or what is new of them, if they are asked for."""
        return {"token_ids": [*choice.token_ids]} if self._body.return_token_ids else {}

    def _prompt_ids(self, begun: Sequence[ResponseStream]) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": [*begun[0].prompt_token_ids]}

    def _reason(self, choice: Choice, called: bool) -> str | None:
        if called and choice.finish_reason == "stop" and not self._forced:
            return "tool_calls"
        return choice.finish_reason

    async def _details(
        self, thoughts: Sequence[str], answers: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """Return how many of the tokens of `answers` came up to the ends of their thoughts."""
        if not any(thoughts):
            return {}
        tokenizer = self._service.tokenizer

        def num_tokens() -> int:
            pairs = zip(thoughts, answers, strict=True)
            return sum(_tokens_up_to(tokenizer, ids, thought) for thought, ids in pairs)

        count = await self._service.read_text(num_tokens, sum(map(len, thoughts)))
        return {"completion_tokens_details": {"reasoning_tokens": count}}

    def _reader(self) -> Reader:
        """Return what takes an answer's text apart."""
        if self._forced is not None:
            thoughts = self._form.reader(in_thought=True) if self._in_thought else None
            return ForcedReader(Parts(), self._forced, thoughts)
        return self._form.reader(
            separate=self._separates,
            tools=self._functions,
            one_call=self._body.parallel_tool_calls is False,
            in_thought=self._in_thought,
        )

    @property
    def _may_call(self) -> bool:
        """Whether the answer may be calls without a text."""
        return bool(self._functions)

    @property
    def _separates(self) -> bool:
        """Whether thoughts leave apart from the text."""
        return self._service.settings.reasoning_parser is not None and self._body.separate_reasoning

    def _offered(self) -> list[dict[str, Any]] | None:
        if not self._body.tools or self._body.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self._body.tools]

    @property
    def forces_call(self) -> bool:
        """Whether the answer is a call or, where it is cut, nothing."""
        return self._forced is not None

    def _forced_tools(self) -> str | None:
        """Return the tool that must be called, "" where any of them; None where none must."""
        choice, tools = self._body.tool_choice, self._body.tools or []
        if choice in (None, "none", "auto"):
            return None
        if not tools:
            raise ApiError(400, "'tool_choice' needs 'tools'", param="tool_choice")
        if choice == "required":
            return ""
        assert isinstance(choice, NamedTool)
        if choice.function.name not in [tool.function.name for tool in tools]:
            raise unknown_tool(choice.function.name, tools)
        return choice.function.name

    def _guide(self) -> tuple[str, dict[str, Any] | None]:
        """Return the field that says what the text must be, and what, unless by vLLM's names."""
        if self._forced is None:
            return self._body.wanted_format()
        field = self._body.guided_by  # `response_format` is of texts, and a call has none
        if field:
            raise ApiError(
                400,
                f"'tool_choice' forces a call, and '{field}' asks for another text; leave one of "
                "them out",
                param="tool_choice",
            )
        functions = [tool.function.model_dump() for tool in self._body.tools or []]
        return "tools", forced_guide(functions, self._forced)

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self._most is None:
            return None
        rows = zip(choice.token_ids, choice.logprobs, strict=False)
        content = [self._token(token, scores) for token, scores in rows]
        return {"content": content, "refusal": None}

    def _token(self, token: int, scores: Mapping[int, Logprob]) -> dict[str, Any]:
        ranked = sorted(scores.items(), key=lambda item: item[1].rank)
        top = [self._score(t, s) for t, s in ranked if s.rank <= (self._most or 0)]
        return {**self._score(token, scores[token]), "top_logprobs": top[: self._most]}

    def _score(self, token: int, score: Logprob) -> dict[str, Any]:
        return {
            "token": score.decoded_token,
            "logprob": max(score.logprob, LEAST_LOGPROB),
            "bytes": list(self._service.tokenizer.bytes_of(token)),
        }


def conversation_length(messages: Sequence[Message], *more: Any) -> int:
    """Return about how many characters a conversation has, and what templates get beside it."""
    length = sum(len(str(data)) for data in more if data)
    for message in messages:
        content = message.content or ""
        parts = (content,) if isinstance(content, str) else map(str, content)
        calls = str(message.tool_calls or message.function_call or "")
        length += sum(map(len, (*parts, calls, message.refusal or "")))
    return length


def plain_message(message: Message) -> dict[str, Any]:
    """Return a message as templates take it; `ApiError` for what is not text."""
    fields = message.model_dump(exclude_none=True, include=_OF_MESSAGES)
    content = message.content if message.refusal and not message.content else message.content or ""
    try:
        return conversation.plain_message({**fields, "content": content})
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None


def _part(
    index: int,
    delta: Mapping[str, Any],
    logprobs: Mapping[str, Any] | None = None,
    reason: str | None = None,
    stop: int | str | None = None,
) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return choice if reason is None else {**choice, "stop_reason": stop}


def _tokens_up_to(tokenizer: Decoder, token_ids: Sequence[int], thought: str) -> int:
    """Return how many of an answer's tokens its thought ends with; 0 without a thought."""
    if not thought:
        return 0

    def text(count: int) -> str:
        return tokenizer.decode(token_ids[:count], skip_special=False)

    end = max(0, text(len(token_ids)).find(thought)) + len(thought)
    counts = range(len(token_ids))
    return bisect_left(counts, end, key=lambda count: len(text(count)))
