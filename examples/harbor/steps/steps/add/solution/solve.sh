#!/bin/bash
git apply <<'EOF'
--- a/stock.py
+++ b/stock.py
@@ -9,7 +9,7 @@
 
     def add(self, name, number):
         """Put articles of a name into the stock."""
-        self.numbers[name] = number
+        self.numbers[name] = self.numbers.get(name, 0) + number
 
     def take(self, name, number):
         """Take articles of a name out of the stock."""
EOF
