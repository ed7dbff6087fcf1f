"""Explain an out-of-memory message: read it, decide what is searched, search, rank the candidates and word the answer.

message_kinds.py has the table of messages. messages.py reads figures, clues.py reads words, and scope.py decides what
is searched. Four files search: vae_runs.py and pipeline_runs.py solve for sizes and play runs (refusals.py),
graph_runs.py plans graphs of stable-diffusion.cpp, and other_tensors.py compares weights and attention scores.
candidates.py has their results. sizes.py lists usual sizes. explanation.py ranks and words.
"""
