#!/bin/bash
git apply <<'EOF'
--- a/stock.py
+++ b/stock.py
@@ -12,5 +12,7 @@
         self.numbers[name] = self.numbers.get(name, 0) + number
 
     def take(self, name, number):
-        """Take articles of a name out of the stock."""
+        """Take articles of a name out of the stock. Raises ValueError if there are not so many."""
+        if self.numbers.get(name, 0) < number:
+            raise ValueError(f"there are not {number} of {name}")
         self.numbers[name] -= number
EOF
