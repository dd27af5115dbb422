"""This package makes task files: it converts public sets (`convert`) and tries each task (`admit`). docs/data.md"""
