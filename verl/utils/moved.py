"""Translates names of reward modules and tool classes in configs: former names, and those of published configs.

Imports of modules that have moved are not translated.
"""

# former module -> module
MOVED = {
    "verl.utils.reward_score.countdown": "recipe.tasks.countdown.reward",
    "verl.utils.reward_score.deep_research": "recipe.tasks.deep_research.reward",
    "verl.utils.reward_score.last_number": "recipe.tasks.word_problems.reward",
    "verl.utils.reward_score.math_equivalence": "recipe.tasks.mathematics.reward",
    "verl.utils.reward_score.walk": "recipe.tasks.walk.reward",
    "verl.workers.rollout.tools.search_tool": "verl.workers.rollout.tools.search.tool",
    "verl.workers.rollout.tools.mcp_tool": "verl.workers.rollout.tools.mcp.tool",
    "verl.workers.rollout.tools.python_tool": "verl.workers.rollout.tools.python.tool",
    # the search in the scripts of arXiv 2507.19849
    "verl.workers.agent.tools.search_tool": "verl.workers.rollout.tools.search.tool",
    "recipe.common.tasks.walk": "recipe.tasks.walk.data",
}


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
