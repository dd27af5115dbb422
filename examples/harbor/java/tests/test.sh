#!/bin/bash
jars=/usr/share/java
javac -d /tmp/classes -cp $jars/junit4.jar Csv.java /tests/CsvTest.java &&
    java -cp /tmp/classes:$jars/junit4.jar:$jars/hamcrest-core.jar org.junit.runner.JUnitCore CsvTest
if [ $? -eq 0 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
