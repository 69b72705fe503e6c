//! `strftime_now`, which some chat templates call to tell the model the date. UTC; not a calendar library.

use std::fmt::Write as _;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats `unix_seconds` as C's `strftime` would in English and UTC. A directive that is not known stays as
/// it is.
pub(crate) fn strftime(format: &str, unix_seconds: u64) -> String {
    let (days, second) = (unix_seconds / 86_400, unix_seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let weekday = ((days + 4) % 7) as usize; // 1970-01-01 was a Thursday
    let day_of_year = days - days_to(year) + 1;
    let hour12 = (hour + 11) % 12 + 1;
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[weekday]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        // Writing to a String cannot fail.
        let _ = match chars.next() {
            Some('Y') => write!(out, "{year}"),
            Some('y') => write!(out, "{:02}", year % 100),
            Some('m') => write!(out, "{month:02}"),
            Some('d') => write!(out, "{day:02}"),
            Some('e') => write!(out, "{day:2}"),
            Some('j') => write!(out, "{day_of_year:03}"),
            Some('B') => write!(out, "{month_name}"),
            Some('b' | 'h') => write!(out, "{}", &month_name[..3]),
            Some('A') => write!(out, "{day_name}"),
            Some('a') => write!(out, "{}", &day_name[..3]),
            Some('H') => write!(out, "{hour:02}"),
            Some('I') => write!(out, "{hour12:02}"),
            Some('M') => write!(out, "{minute:02}"),
            Some('S') => write!(out, "{:02}", second % 60),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{:02}", second % 60),
            Some('Z') => write!(out, "UTC"),
            Some('z') => write!(out, "+0000"),
            Some('%') | None => write!(out, "%"),
            Some(other) => write!(out, "%{other}"),
        };
    }
    out
}

/// Days from 1970-01-01 to January 1st of `year`.
fn days_to(year: u64) -> u64 {
    let y = year - 1;
    365 * (year - 1970) + (y / 4 - y / 100 + y / 400) - 477
}

/// Year, month (1..=12) and day (1..=31) of a day counted from 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_to(year + 1) <= days {
        year += 1;
    }
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut rest = days - days_to(year);
    let lengths = [31, 28 + u64::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (i, length) in lengths.into_iter().enumerate() {
        if rest < length {
            return (year, i as u64 + 1, rest + 1);
        }
        rest -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S %a", 0), "1970-01-01 00:00:00 Thu");
        assert_eq!(strftime("%d %b %Y, %A, day %j", 951_782_400), "29 Feb 2000, Tuesday, day 060");
        assert_eq!(strftime("%F %T", 1_735_689_599), "2024-12-31 23:59:59");
        assert_eq!(strftime("%B %e, %y %I %p %Z", 1_795_176_000), "November 20, 26 12 PM UTC");
        assert_eq!(strftime("100%% %Q %", 0), "100% %Q %");
        assert_eq!(strftime("%F", 4_107_542_400), "2100-03-01");
    }
}
