//! What a chat server is asked in the cohort protocol.

/// Eight requests as people make them: English, Danish and code, between 45 and 300 tokens in the family's own
/// vocabulary, each with room for a long answer. All written for this purpose.
pub(crate) const CHATS: [&str; 8] = [
    "Explain to a curious fifteen-year-old why the sky is blue at noon and red in the evening. Begin with what \
     light is, go on with what happens to it in air, and end with one experiment that can be done in a kitchen \
     with a torch and a glass of water. Do not use formulas, and say where your explanation simplifies.",
    "Skriv en venlig, men bestemt mail til en håndværker, som for tredje gang har udskudt reparationen af vores \
     badeværelse. Vi har betalt halvdelen forud, gulvet er åbent, og familien kommer på besøg om to uger. Foreslå \
     to konkrete datoer, bed om en skriftlig plan, og nævn til sidst, hvad vi gør, hvis den heller ikke holder.",
    "Write a Python function that reads a CSV file of bank transactions with the columns date, amount, currency \
     and text, and returns the sum per month and currency. Amounts may use a comma or a point as decimal sign. \
     Rows that cannot be read must be collected with their line number and the reason, not skipped. Add type \
     hints, a docstring and five pytest cases.",
    "Here is a Rust function that shall remove duplicates from a list without changing the order:\n\n\
     ```rust\nfn unique(items: Vec<String>) -> Vec<String> {\n    let mut seen = Vec::new();\n    for item in items \
     {\n        if !seen.contains(&item) {\n            seen.push(item.clone());\n        }\n    }\n    seen\n}\n```\n\n\
     It is called with half a million strings and takes minutes. Explain why, write a version whose time grows \
     linearly, keep the signature, and show with a short calculation how much memory the new version needs for \
     strings of 40 bytes on average. Then say when the old version would still be the better choice.",
    "Giv mig en oversigt over Danmarks geografi til en skoleklasse: landsdele, de største øer, vigtige fjorde og \
     bælter, det højeste punkt og de fem største byer. Forklar bagefter, hvordan istiden har formet landskabet i \
     øst og vest, og slut med tre spørgsmål, som eleverne kan arbejde videre med.",
    "We run a small online bookshop. Last month 12,400 people visited it, 310 bought something, and the average \
     order was 38 euros. An agency offers to double the number of visitors for 2,000 euros a month; a designer \
     offers to simplify the checkout, which now takes six pages, for 4,500 euros once. Our margin is 30 percent. \
     Compare the two offers over one year: state your assumptions, show the arithmetic step by step, name the \
     biggest risk of each, and recommend one. Finally, tell us which single number we should measure first to \
     find out whether you were right, and how long we would have to wait until that number can be trusted.",
    "Tell a story of about six hundred words about a lighthouse keeper who receives a letter that is addressed to \
     the person who will live there in a hundred years. Write in the past tense, keep the weather present in \
     every scene, and let the last sentence be a question.",
    "Summarise the following notes of a meeting as minutes with decisions, open questions and tasks, each task with \
     a name and a date.\n\n\
     Anna opened at nine. The new release is late because the test machines were down from Monday to Wednesday; \
     Jonas has ordered two more, they come on the 14th. Mette asked whether we can ship without the export \
     feature. Long discussion. Sales promised it to two customers, one of whom would accept a preview. Anna: we \
     ship on the 20th without export, preview to that customer on the 27th, Mette writes to both by tomorrow. \
     Jonas thinks the database upgrade should wait until after the release, nobody disagreed, but Peter was not \
     there and it is his. Peter to be asked. The support team wants a rota for the weekend after the release; \
     Mette and Jonas volunteer for Saturday, Sunday is open. Budget for the second half of the year was not \
     discussed, moved to next week. Somebody has to book the big room for the customer visit on the 3rd, Anna \
     will do it if nobody else has by Friday.",
];

/// The `index`th chat of a row. The first line makes it unlike any other request, so that no server can answer from
/// what it remembers of an earlier one.
pub(crate) fn chat(seed: u64, row: u64, index: usize) -> String {
    format!("Request {seed:x}-{row}-{index}.\n\n{}", CHATS[index % CHATS.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_requests_begin_alike() {
        let mut lines: Vec<String> = Vec::new();
        for row in 0..4 {
            lines.extend((0..16).map(|index| chat(1000, row, index).lines().next().unwrap().to_owned()));
        }
        let all = lines.len();
        lines.sort();
        lines.dedup();
        assert_eq!(lines.len(), all);
        assert!(chat(1000, 0, 9).ends_with(CHATS[1]));
    }
}
