"""Task files: public sets are converted (`convert`), and each task is tried (`admit`) and measured (`probe`).

`make` makes tasks of Python packages, `overlap` finds what tasks have in common, `select` chooses episodes.
docs/data.md
"""
