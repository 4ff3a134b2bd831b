"""An OpenAI-compatible server on loopback whose model adds: what it answers, and how often it fails, is known."""

import json
import random
import re
import threading
import time
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from recipe.common.tiny_model import make_tokenizer
from verl.evaluation.model.server import free_port


class ToyModel:
    """A model that adds two numbers, wrong by one for a third of the seeds. With tools it first calls `search`.

    Args:
        failures: number of requests answered by 503 before the first good answer.
        verdict: answer to every chat, for a model that is a judge.
        seconds: duration of an answer.
        owned_by: kind of server in the list of models, such as `vllm`.
        context: largest number of tokens of prompt and response together; longer responses are cut.
    """

    def __init__(
        self,
        failures: int = 0,
        verdict: str | None = None,
        seconds: float = 0.0,
        token_ids: bool = True,
        owned_by: str = "toy",
        context: int = 4096,
    ):
        self.context, self.owned_by = context, owned_by
        self.failures, self.verdict, self.seconds, self.token_ids = failures, verdict, seconds, token_ids
        self.tokenizer, self.asked, self.running, self.most_at_once = make_tokenizer(), [], 0, 0
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.get("/health")(lambda: {})
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/v1/chat/completions")(self.chat)

    async def models(self):
        about = {"id": "toy", "object": "model", "max_model_len": self.context, "owned_by": self.owned_by}
        return {"object": "list", "data": [about]}

    async def completions(self, request: Request):
        asked = await request.json()
        return await self._reply(asked, self.answer(self.tokenizer.decode(asked["prompt"]), asked), "text")

    async def chat(self, request: Request):
        asked = await request.json()
        text = asked["messages"][-1]["content"]
        if self.prompt_tokens(asked) + asked.get("max_completion_tokens", 1) > self.context:
            self.asked.append(asked)
            message = f"This model's maximum context length is {self.context} tokens."
            return JSONResponse({"error": {"message": message, "param": "max_tokens", "code": 400}}, status_code=400)
        return await self._reply(asked, self.verdict or self.answer(text, asked), "message")

    def prompt_tokens(self, asked: dict) -> int:
        return len(self.tokenizer.encode(asked["messages"][-1]["content"], add_special_tokens=False))

    def answer(self, prompt: str, asked: dict) -> str:
        first, second = map(int, re.findall(r"(\d+) \+ (\d+)", prompt)[-1])
        if "search" in str(asked.get("stop")) and "<result>" not in prompt.rpartition("assistant")[2]:
            return f"<think>look</think><search>{first} + {second}</search>"
        if "Tools:" in prompt and "<tool_response>" not in prompt:
            call = f'{{"name": "search", "arguments": {{"text": "{first} + {second}"}}}}'
            return f"<think>look</think>\n<tool_call>\n{call}\n</tool_call>"
        right = first + second + (random.Random(asked["seed"]).random() < 1 / 3)
        return f"<answer>\\boxed{{{right}}}</answer>"

    async def _reply(self, asked: dict, text: str, kind: str):
        import asyncio

        self.asked.append(asked)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        if self.failures:
            self.failures -= 1
            return JSONResponse({"error": {"message": "busy"}}, status_code=503)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if not text.endswith("</search>"):
            tokens = [*tokens, self.tokenizer.eos_token_id]
        n_prompt = len(asked["prompt"]) if kind == "text" else self.prompt_tokens(asked)
        most = min(asked.get("max_completion_tokens", asked.get("max_tokens", self.context)), self.context - n_prompt)
        choice = {"index": 0, "finish_reason": "length" if len(tokens) > most else "stop"}
        tokens = tokens[:most]
        choice |= (
            {"text": text, "token_ids": tokens}
            if kind == "text"
            else {"message": {"role": "assistant", "content": text}}
        )
        if not self.token_ids:
            choice.pop("token_ids", None)
        usage = {"prompt_tokens": 1, "completion_tokens": len(tokens), "total_tokens": len(tokens) + 1}
        body = {"id": "1", "object": "x", "created": 0, "model": "toy", "choices": [choice], "usage": usage}
        return JSONResponse(json.loads(json.dumps(body)))


@contextmanager
def toy_server(model: ToyModel):
    """Serve the model and yield the server's URL."""
    config = uvicorn.Config(model.app, host="127.0.0.1", port=(port := free_port()), log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
