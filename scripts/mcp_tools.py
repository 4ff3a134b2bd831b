"""Prints the tags of an MCP server's tools, and their functions in OpenAI's format, as chat templates read them.

python scripts/mcp_tools.py python my_project/library_server.py     # a command, which talks over stdin and stdout
python scripts/mcp_tools.py http://node0:8000/mcp                   # an address
python scripts/mcp_tools.py --pass-env LIBRARY_KEY npx -y library-server
"""

import argparse
import asyncio
import json
import sys

from verl.workers.rollout.tools.mcp.tool import MCPTool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pass-env", action="append", default=[], help="an environment variable that the command gets")
    parser.add_argument("--header-env", action="append", default=[], help="X-Api-Key=VARIABLE, for the address")
    parser.add_argument("server", nargs=argparse.REMAINDER, help="the command and its arguments, or an address")
    args = parser.parse_args()
    if not args.server:
        parser.error("name a command or an address")
    is_address = args.server[0].startswith(("http://", "https://"))
    where = {"url": args.server[0]} if is_address else {"command": args.server}
    try:
        headers = dict(header.split("=", 1) for header in args.header_env)
        made = MCPTool(**where, pass_env=args.pass_env, headers_env=headers)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for tool in made.tools:
        print(f"<{tool.trigger_tag}>: {json.dumps(tool.function(), ensure_ascii=False)}")
    asyncio.run(made.tools[0].close())


if __name__ == "__main__":
    main()
