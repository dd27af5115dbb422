use versions::newest;

#[test]
fn parts_are_numbers() {
    assert_eq!(newest(&["1.9.0", "1.10.0"]), Some("1.10.0"));
    assert_eq!(newest(&["9.0.0", "10.0.0", "2.11.12"]), Some("10.0.0"));
}

#[test]
fn others() {
    assert_eq!(newest(&["1.2.3", "1.2.4"]), Some("1.2.4"));
    assert_eq!(newest(&[]), None);
}
