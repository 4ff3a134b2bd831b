"""Translates names of reward modules and tool classes in configs: former names, and those of published configs.

Imports of modules that have moved are not translated.
"""

REWARDS = {
    "countdown": "recipe.tasks.countdown.reward",
    "deep_research": "recipe.tasks.deep_research.reward",
    "last_number": "recipe.tasks.word_problems.reward",
    "math_equivalence": "recipe.tasks.mathematics.reward",
    "walk": "recipe.tasks.walk.reward",
}
TOOLS = {"search_tool": "search.tool", "mcp_tool": "mcp.tool", "python_tool": "python.tool"}
# former module -> module
MOVED = {f"verl.utils.reward_score.{old}": new for old, new in REWARDS.items()}
MOVED |= {f"verl.workers.rollout.tools.{old}": f"verl.workers.rollout.tools.{new}" for old, new in TOOLS.items()}
MOVED["recipe.common.tasks.walk"] = "recipe.tasks.walk.data"
# the search in the scripts of arXiv 2507.19849
MOVED["verl.workers.agent.tools.search_tool"] = MOVED["verl.workers.rollout.tools.search_tool"]


def present_name(name: str) -> str:
    """Return the present name of a module or of something in it; other names are returned as they are.

    >>> present_name("pkg://verl.utils.reward_score.walk"), present_name("verl.workers.rollout.tools.mcp_tool.MCPTool")
    ('pkg://recipe.tasks.walk.reward', 'verl.workers.rollout.tools.mcp.tool.MCPTool')
    """
    prefix = "pkg://" if name.startswith("pkg://") else ""
    path = name.removeprefix(prefix)
    for old, new in MOVED.items():
        if path == old or path.startswith(f"{old}."):
            return prefix + new + path.removeprefix(old)
    return name
