"""Two clocks: the host's queue and the device's, and every order in which they can meet.

After a verify step the device knows how many tokens of each row were kept. A scheduler that does not
stand still for it lets the counts be copied to the host *some time*, and meanwhile prepares the next
step: requests finish, the last row closes the gap, new requests are admitted. Each queue keeps its own
order; between them anything goes that nobody waits for. This module runs a small step in all of those
orders, and says which request then reads whose count.

The step of the tale: rows A, B, C kept 3, 1, 2 tokens. A finishes, C moves to row 0, and D is admitted
into row 2, which has just become free. For real threads and streams it would take load and luck.

    from mamba_teach.two_clocks import DESIGNS, explore

    for outcome in explore(DESIGNS["gather by old rows"]):
        print(" | ".join(outcome.order), outcome.wrong)

A count is wrong if it is another request's or an older step's, even if the number happens to be right.
Reported in vLLM pull requests 53919, 51599, 45100 and 53613, and vllm-ascend pull request 13863.
"""

from mamba_teach.two_clocks.design import DESIGNS, ENGINE, Design
from mamba_teach.two_clocks.orders import Outcome, explore
from mamba_teach.two_clocks.step import MINIATURE, Count, Step

__all__ = ["DESIGNS", "ENGINE", "MINIATURE", "Count", "Design", "Outcome", "Step", "explore"]
