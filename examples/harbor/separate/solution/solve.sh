#!/bin/bash
git apply <<'EOF'
--- a/durations.py
+++ b/durations.py
@@ -7,5 +7,7 @@
 
 def seconds(text):
     """Return the seconds of a duration. Raises ValueError for what is none."""
+    if not re.fullmatch(r"(\d+[smh])+", text):
+        raise ValueError(f"{text!r} is no duration")
     parts = re.findall(r"(\d+)([smh])", text)
     return sum(int(number) * UNITS[unit] for number, unit in parts)
EOF
