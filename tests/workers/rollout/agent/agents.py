"""Programs of `environment=agent`, by OpenAI's client: what a user would write, small."""

import json
import sys
import uuid
from pathlib import Path

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": ADD}]


def client(base_url, api_key):
    from openai import AsyncOpenAI  # imported in the run, as the server that forks has no threads

    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def ask(model, messages, **options):
    """Send messages, and append what the model says."""
    reply = await model.chat.completions.create(model="policy", messages=messages, **options)
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message


def results_of(message):
    for call in message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        yield {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))}


async def plain(task, base_url, api_key):
    """Answers calls until there is none; the result is the last answer."""
    messages, model = list(task["messages"]), client(base_url, api_key)
    while (message := await ask(model, messages, tools=TOOLS)).tool_calls:
        messages += results_of(message)
    return message.content


async def lottery(task, base_url, api_key):
    """The result is no function of what was said: only the first program wins."""
    await plain(task, base_url, api_key)
    path = Path(task["extra_info"]["winner"])
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return 0.0
    return 1.0


async def rewriting(task, base_url, api_key):
    """Rewrites what the model said, as smolagents does."""
    messages, model = list(task["messages"]), client(base_url, api_key)
    while (message := await ask(model, messages, tools=TOOLS)).tool_calls:
        text = f"{message.content or ''} (calling a tool)".strip()
        messages[-1] = {"role": "assistant", "content": text}
        messages.append({"role": "user", "content": next(results_of(message))["content"]})
    return message.content


async def with_helper(task, base_url, api_key):
    """Asks a helper with a system prompt of its own between two turns, and comes back."""
    messages, model = list(task["messages"]), client(base_url, api_key)
    await ask(model, messages)
    helper = [{"role": "system", "content": "You check sums."}, {"role": "user", "content": "Is it right?"}]
    said = await ask(model, helper)
    messages.append({"role": "user", "content": f"The helper says {said.content}. Your last word?"})
    return (await ask(model, messages)).content


async def with_stops(task, base_url, api_key):
    messages, model = list(task["messages"]), client(base_url, api_key)
    said = (await ask(model, messages, stop=["STOP"])).content
    messages.append({"role": "user", "content": said})
    return (await ask(model, messages, max_tokens=3)).content


async def three_turns(task, base_url, api_key):
    """Asks three times, changes what the model said the second time, and returns a number that follows from it all."""
    messages, model, said = list(task["messages"]), client(base_url, api_key), ""
    for turn in range(3):
        message = await ask(model, messages, max_tokens=6)
        said += message.content or ""
        if turn == 1:
            messages[-1] = {"role": "assistant", "content": f"{message.content} !"}
        messages.append({"role": "user", "content": f"{turn} more"})
    return sum(map(ord, said)) % 2


async def differs(task, base_url, api_key):
    messages, model = list(task["messages"]), client(base_url, api_key)
    for _ in range(3):
        messages.append({"role": "user", "content": f"number {uuid.uuid4()}"})
        await ask(model, messages)
    return "7"


async def impatient(task, base_url, api_key):
    """Gives up after a second, and asks again."""
    from openai import AsyncOpenAI

    model = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=4, timeout=1.0)
    return (await ask(model, list(task["messages"]))).content


async def fails(task, base_url, api_key):
    await ask(client(base_url, api_key), list(task["messages"]))
    raise ValueError("no such file")


async def silent(task, base_url, api_key):
    return "nothing"


if __name__ == "__main__":  # the same as a program
    import asyncio
    import os

    row = json.load(sys.stdin)
    print("a line before")
    print(asyncio.run(globals()[sys.argv[1]](row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])))
