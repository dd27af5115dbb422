import static org.junit.Assert.assertEquals;

import java.util.List;
import org.junit.Test;

public class CsvTest {
    @Test
    public void twoQuotesStandForOne() {
        assertEquals(List.of("1", "say \"hi\""), Csv.fields("1,\"say \"\"hi\"\"\""));
        assertEquals(List.of("\",", "x"), Csv.fields("\"\"\",\",x"));
    }

    @Test
    public void others() {
        assertEquals(List.of("a", "b,c", ""), Csv.fields("a,\"b,c\","));
        assertEquals(List.of("", "b"), Csv.fields("\"\",b"));
    }
}
