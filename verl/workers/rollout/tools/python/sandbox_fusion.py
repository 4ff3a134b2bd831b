"""The Python tool's other backend: a Sandbox Fusion server by ByteDance (https://github.com/bytedance/SandboxFusion).

    POST {url}/run_code   {"code": "…", "language": "python", "run_timeout": 9.5, "memory_limit_MB": 1024, …}
    200                   {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "…"}}

The program is sent within cell.py, so that the model reads the same as from this machine's sandboxes: the last
expression's value, standard output and errors in their order, short tracebacks.
"""

from pathlib import Path
from typing import Any

from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.http_json import checked_url, json_client, post_json
from verl.workers.rollout.tools.python.session import Result

_CELL = (Path(__file__).resolve().parent / "cell.py").read_text()
_CALL = """
import os
os.dup2(1, 2)
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
run({!r})
os._exit(0)
"""
SERVER = "the Sandbox Fusion server"


class SandboxFusion:
    """A client of a Sandbox Fusion server, whose address may end with /run_code, and which enforces `memory_mb`."""

    def __init__(self, url: str, *, memory_mb: int):
        checked = checked_url(url, "sandbox_fusion_url")
        path = checked.path.rstrip("/")
        self.url = checked.copy_with(path=path if path.endswith("/run_code") else path + "/run_code")
        self.memory_mb, self._client = memory_mb, json_client(self.url)

    async def run(self, code: bytes, seconds: float) -> Result:
        """Run a program, a text in UTF-8, for at most `seconds`. The server's faults are ToolErrors of `post_json` and
        of the kinds `sandbox` and `bad_reply`, which allow a retry."""
        request = {"code": _CELL + _CALL.format(code.decode()), "language": "python", "memory_limit_MB": self.memory_mb}
        request |= {"compile_timeout": seconds, "run_timeout": seconds, "stdin": None, "files": {}, "fetch_files": []}
        margin = min(0.5, seconds / 10)  # for the reply
        reply = await post_json(self._client, self.url, request, timeout=seconds + margin, server=SERVER)
        try:
            return _result(reply)
        except (KeyError, TypeError, AttributeError) as error:
            raise ToolError(f"{SERVER} sent an unreadable reply", kind="bad_reply", retry=True) from error

    async def close(self) -> None:
        await self._client.aclose()


def _result(reply: dict[str, Any]) -> Result:
    """Return the result in a reply; raise KeyError, TypeError or AttributeError for a reply of another form."""
    result = reply["run_result"] if reply["status"] in ("Success", "Failed") else None
    status = result["status"] if result is not None else reply["status"]
    if status not in ("Finished", "TimeLimitExceeded"):  # SandboxError, Error
        raise ToolError(f"{SERVER} could not run the program", kind="sandbox", retry=True)
    output = "".join(result[stream] or "" for stream in ("stdout", "stderr")).encode("utf-8", "replace")
    if status == "TimeLimitExceeded":
        return Result(output, 0, "timeout")
    if isinstance(result["return_code"], bool) or not isinstance(result["return_code"], int):
        raise TypeError("return_code")
    return Result(output, result["return_code"])
