"""The verifier by examples: which answers are extracted, which are the same, and texts that try to break it."""
import threading
import time

import pytest

from common import SYSTEM_PROMPT, extract_answer, format_reward, is_equivalent, is_worked_out


@pytest.mark.parametrize("text, answer", [
    ("<think>2+4=6</think><answer>46</answer>", "46"), ("<answer>1</answer> no: <answer> 2 </answer>", "2"),
    ("<answer>5</answer><answer>6", "5"), ("<answer>5 no: <answer>6", "6"),  # the last one, or none, is closed
    ("\\boxed{5}? no.</think>The answer is 6.", "6"), ("<think>\\boxed{5}</think> So it is.", "5"),
    ("<think>2+4=6</think><answer> 46\n", "46"), ("<answer>", None), ("\\boxed{5} <answer>", "5"),  # none is closed
    ("so $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"), ("\\boxed{1} and \\boxed{2", "1"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"), ("<answer>\\boxed{3}</answer>", "3"), ("\\boxed{4} <answer>5</answer>", "5"),
    ("<answer>4</answer> \\boxed{5}", "5"), ("Then 48+24 = 72.\n#### 72", "72"), ("a #### 5", None), ("####", None),
    ("So each gets 2 bars. #### 2", "2"), ("It is option C. #### C \n", "C"), ("Fine. #### Part 1\nAdd up.", None),
    ("**He is 13.** #### 13", "13"), ("It is \\boxed{5}. So 5+1. Final Answer: The final answer is 6. I hope so.", "6"),
    ("<think>It is 5. #### 5</think>", None),
    ("A: 18", "18"), ("I think A: 5", None), ("**Answer:** 7", "7"), ("# Answer\n\n17", "17"),
    ("The answer is 42.", "42"), ("The final answer is $\\boxed{5}$.", "5"),
    ("", None), (None, None), ("Final Answer: The final answer is $5$. I hope it is correct.", "$5$"),
    ("**The answer is 5.**", "5"), ("The answer is not clear. The answer is 6 because 5+1=6.", "6"),
    ("The answer is 24 (since 12*2=24).", "24"),
    ("The answer is 5 apples, and the final answer is 6.", "6"), ("So the answer is:\n\n$5.50", "$5.50"),
    ("Answer: Let us see.\n2+2=4\n#### 4", "4"), ("#### 18</s>", "18"), ("The answer is 18<|im_end|>", "18"),
    ("#### 18<end_of_turn><eos>", "18"), ("#### 18<｜end▁of▁sentence｜>", "18"),
    ("The answer is $5$, as desired.", "$5$"), ("So the answer is 18 apples, which is less than 20.", "18 apples"),
    ("#### 3\nWait.\n#### 4", "4"), ("**Final Answer**\n\n\\[ \\boxed{5} \\]", "5"),
    ("**Answer:**\n42", "42"), ("## Final Answer:\n\n\\[\n42\n\\]", "42"), ("**Final answer: 42**", "42"),
    ("Answer:\nLet us see.\nThe answer is 4.", "4"), ("A: **18** apples", "18 apples"),
    ("Answer: \\[\n42", "42"), ("**Answer:**\n\n---\n\n42", "42"), ("# Answer\n-5", "-5"),
    ("# Answer\n\n## Check", None), ("**A**\n\nas 2+2=4. The answer is 5.", "5"),
    ("\\\\boxed{004}", "004"), ("\\boxed{5} or \\boxed{}", "5"),
    ("\\boxed{18}\n\n**Answer:**", "18"), ("### **Final Answer**\n42", "42"), ("#### Answer\n18", "18"),
    ("**Answer:**\nWe have 2+2=4.\n\nSo the answer is 4.", "4"), ("### Answer:\n42\n\nThe answer is as above.", "42"),
    ("\\boxed{1}, then \\boxed{x = \\boxed{2}}", "2"), ("## Final Answer\n\n4", "4"), ("\\boxed 5", "5"),
    ("$\\boxed{1}$ and $\\boxed{-2}$.", "1, -2"), ("\\boxed{5}\n\\boxed{5}", "5"),
    ("\\[\n\\text{ANSWER: } 4\n\\]", "4"),
    ("\\boxed{1},\n\n" + " " * 30 + "no wait, \\boxed{2}", "2"), ("\\boxed{1}," + " " * 50 + "\\boxed{2}", "1, 2"),
    ("\\boxed{(1,2)}, \\boxed{(2,1)} \\quad \\text{and} \\quad \\boxed{3}", "(1,2), (2,1), 3"),
    ("The answer (arabic numerals) is 8. I hope this helps!", "8"), ("The answer to the question is 18.", "18"),
    ("The answer in dollars is $18.", "$18"), ("The answer to this problem was hard to find.", None),
    ("The answer is:\n\n\\[\n5\n\\]", "5"), ("So the answer is\n$$\n5\n$$", "5"), ("The answer should be 5.", "5"),
    ("The answer is 5. I hope this answer is correct.", "5"), ("The answers are 1 and 2.", "1 and 2"),
    ("The correct option is (B).", "(B)"), ("The answer is $5! = 120$.", "$5! = 120$"),
    ("The answer is 18! I hope so", "18"),
    ("The answer is Rs. 400.", "Rs. 400"), ("So the answer is ] }.", "] }"),
    ("The answer is 5 sq. ft.", "5 sq. ft"), ("#### Step 1\n2+2=4\n\nThe answer is 4.", "4"), ("Answer : 5", "5"),
    ("##### 18", "18"), ("\\boxed{5}\n\n##### Explanation\nIt is so.", "5"), ("The answer is 5.\n#####", "5"),
    ("\\boxed{5}\n\n#### Check:\n2+3=5", "5"), ("\\boxed{5}\n\n#### Key idea\nSymmetry.", "5"),
    ("\\boxed{5}\n\n#### Step 2\nAdding 3 gives 8.", "5"),
    ("\\boxed{5}\n\n#### Part 1\nAdd 3.", "5"), ("#### Final Answer\nThe final answer is 5.", "5"),
    ("\\boxed{5}\n\n#### Discussion\nIt fits.", "5"), ("\\boxed{5}\n\n#### 💡 Recap\nIt fits.", "5"),
    ("\\boxed{5}? No.\n\n#### 6", "6"), ("\\boxed{5}? No.\n\n#### \\pi", "\\pi"),
    ("<answer>5</answer>\n#### Red", "Red"),
    ("\\boxed{5}? No.\n\n#### B\n", "B"), ("\\boxed{5}\n\n#### Final Answer: B\nIt fits.", "B"),
    ("**Answer: 5** 🎯", "5"), ("**Answer:**\n1. Add.\n2. It is 5.", "1. Add."),
    ("A: On Monday he ran 3 miles.\nThe answer is 19.", "19"), ("The answer is indeed 5.", "5"),
    ("#### New York\nQuestion: 3+4", "New York"), ("#### Casey", "Casey"), ("#### Red\n\nWait, let me check.", "Red"),
    ("#### No solution\n<|im_end|>", "No solution"), ("#### Case 2: b\nThe answer is 4.", "4"),
    ("#### 18 eggs\n\nQuestion: 3+4", "18 eggs"), ("**Answer:** Janet makes **$18** a day.", "Janet makes $18 a day"),
    ("# Answer\n\nAll real numbers", "All real numbers"), ("**Final Answer**\n\nA and C", "A and C"),
    ("# Answer\n\nAdding both gives\n\\boxed{4}", "4"), ("# Answer\n\nA look back:\nThe answer is 4.", "4"),
    ("A: There are 15 trees.\nThen there were 21.\nThe answer is 6.", "6"),
    ("A: There are 15 trees.\nThe answer is clear.", "There are 15 trees."),
    ("The answer is equal to 6.", "6"),
    ("Answer: 5 cm\n\nWith a radius of 3, the answer would be 27.", "5 cm"), ("$x=\\boxed{2}, y=\\boxed{3}$", "2, 3"),
    ("Answer: 5\n\nThis answer is consistent with the 5 apples.", "5"), ("Answer: 5\nThe answer is clear.", "5"),
    ("Final Answer: $120$. I hope it is correct.", "$120$"), ("So \\boxed5", "5"), ("The answer equals 6.", "6"),
    # several boxes, or equations on lines of their own, are a list; B: below makes A: an option
    ("$x_1=\\boxed{2}$ and $x_2=\\boxed{3}$", "2, 3"), ("\\boxed{2} \\quad \\boxed{3}", "2, 3"),
    ("$x=\\boxed{1}$ 或 $x=\\boxed{2}$", "1, 2"), ("**\\boxed{2}**, **\\boxed{3}**", "2, 3"),
    ("\\boxed{2}\n\n\\boxed{3}", "3"), ("**Answer:**\n- x = 2\n- x = 3", "x = 2\n- x = 3"),
    ("The answers are:\n\\[ x = 2 \\]\nor\n\\[ x = 3 \\]", "x = 2 \\]\nor\n\\[ x = 3 \\]"),
    ("Answer: x = 2\nx = 2 is the only root.", "x = 2"), ("Answer: 42\nx = 5", "42"),
    ("The answer is 42.\nx = 5", "42"),
    ("radius = \\boxed{2}, area = \\boxed{4}", "4"), ("The limit: the answer is does not exist.", "does not exist"),
    ("The answer is 12*3 = 36.\nn = 36", "12*3 = 36"), ("\\boxed{5}\\quad\\boxed{5}", "5"),
    ("Answer: <answer>18", "18"), ("A: 1\nB: 2\n\nA: B", "B"), ("The answer is always true.", "always true"),
    ("A: 10\nB: 12\n\nThe answer is B.", "B"), ("\\boxed{12}\n\n**A: 5**\n**B: 7**", "12"),
    ("The answer is still 5, not 6.", "5"), ("The answer is $\\frac12$, i.e. $0.5$.", "$\\frac12$"),
    ("Final Answer: The final answer is $120.$ I hope it is correct.", "$120"), ("The answer is simply 6.", "6"),
    ("$x=\\boxed{2}$ or $x=\\boxed{-3}$", "2, -3"), ("The answer is $3!\\cdot 5!$", "$3!\\cdot 5!$"),
    ("#### 1. Read it\n\nThe answer is 4.", "4"), ("#### 1.5", "1.5"), ("Ans: 5", "5"), ("<Answer>5</Answer>", "5"),
    ("The answer, as a common fraction, is 1/2.", "1/2"), ("The answer rounded to the nearest ten is 60.", "60"),
    ("The answer is given by 5.", "5"), ("\\boxed{\\text{The answer is 5.}}", "5"), ("$\\text{The answer is 5.}$", "5"),
    ("The answer will be 18.", "18"), ("The answer is just 6.", "6"),
    ("### Final Answer\n\nShe makes **$18** a day.", "She makes $18 a day."),
    ("**Answer**: It takes 5 hours.", "It takes 5 hours"),
    ("### Final Answer\nThe point $(0, 3)$ is:\n$$\n(3, \\pi)\n$$", "(3, \\pi)"), ("# Answer\nIt is: \\[42", "42"),
    ("# Answer\n\nNobody knows.", None), ("<answer>9*2=18\n#### 18</answer>", "18"), ("A: 18</answer> So", "18"),
    ("<answer>18</answer>(</answer>", "18</answer>("),  # which equals no number
    ("<answer>\nAnswer: 18</answer>", "18"), ("Answer: <answer>18</answer>", "18"),
    ("$x=\\boxed{1}$ and $x=\\boxed{-2}$", "1, -2"),
    ("**Answer:** 18 ✅", "18"), ("**Answer: 18** ✔️", "18"), ("## ✅ Answer\n\n18", "18"),
    ("\\boxed{18\\checkmark}", "18"), ("The answer is:\n\n- 18", "18"),
    ("**Answer:**\n\n- **18**", "18"), ("The answer is:\n-18", "-18"),
    ("**Answer:**\n\\[\n- \\frac{1}{2}\n\\]", "- \\frac{1}{2}"), ("**Answer:**\n-18", "-18"),
    ("**Answer:** \\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("**Answer:** \\begin{cases}\nx = 1 \\\\\ny = 2\n\\end{cases}", "\\begin{cases} x = 1 \\\\ y = 2 \\end{cases}"),
    ("The answer is - 5.", "- 5"), ("**Answer:** - 5", "- 5"), ("**A:** 18", "18"), ("**A**: 18", "18"),
    ("# Answer\n\nNo real solutions", "No real solutions"), ("# Answer\n\nNone of these", "None of these"),
    ("\\boxed{5}\n\n#### Adding up:\n2+3 = 5", "5"), ("\\boxed{5}\n\n#### Adding it up\n2+3 = 5", "5"),
    ("\\boxed{5}\n\n#### **Step 1**\nAdd.", "5"), ("\\boxed{5}\n\n#### **Adding up:**\n2+3 = 5", "5"),
    ("\\boxed{4}\n\n## Answer check\nFine.", "4"), ("\\(x=\\boxed{1}\\) and \\(y=\\boxed{2}\\)", "1, 2"),
    ("The answer is:\n\\begin{align*}\nx = 5\n\\end{align*}", "x = 5"), ("The correct choice is (B).", "(B)"),
    ("The answer is 5.\n\nThe first answer is incorrect.", "5"), ("The answer is 42\nx = 5", "42"),
    ("The answer is 204. The answer is an integer from 0 to 999.", "204"), ("\\[\\text{The answer is 5.}\\]", "5")])
def test_the_last_answer_is_extracted(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text, answer", [
    ("2+5 = 7. So she has 7 apples.\n", "7"), ("- **Therefore, she earns $460.**", "$460"), ("So **x = 7**.", "7"),
    ("\\boxed{5}? no.</think>\n\nThus, it is $6$.", "6"), ("Hence the pair is $(7, 6)$.", "(7, 6)"),
    ("So we get 9 x $2 = $18.", "$18"), ("She has $36 - $15 = $21 left.", "$21"), ("Prices are $3 and $4.", "$3, $4"),
    ("800 gallons - 250 gallons = 550 gallons.", "550"), ("In 2019, 5 were left.", "5"), ("He ate 3 1/2.", "3 1/2"),
    ("So $x = 2$ or $x = 3$.", "x = 2, x = 3"), ("The roots are 1, 2, and 3.", "1, 2, 3"), ("18 are left.", "18"),
    ("We get\n\\[\\frac{8}{21}\\]", "\\frac{8}{21}"), ("The product is $9$", "9"), ("It is $\\$78$.", "\\$78"),
    ("So $\\frac{9}{2}$ as a decimal is 4.5.", "4.5"), ("So it is 2x + 3.", "2x + 3"), ("So x=5.", "5"),
    ("This is x + 3 in 2 steps? No, it is x + 3.", "x + 3"), ("1,234.50 €!", "1,234.50"),
    ("No: 5 * 10^3.", "5 * 10^3"), ("The probability is \\frac{33}{100}.", "\\frac{33}{100}"),
    ("It is $ \\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} $.", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("He has 10 * 4 = <<10*4=40>>40.", "40"), ("$f(x) = x^2$ for all $x$.", "f(x) = x^2"),
    ("It is 2x − 1.", "2x − 1"), ("$ 18 or $ 20 is paid.", "20"), ("**So it is 5.**</s>", "5"),
    ("Pay **$64** for 16 glasses.", "$64"), ("Then the total is:\n\n**$20**", "$20"), ("**Step 3:** It is 18.", "18"),
    ("**Total: 160 minutes**", "160"), ("- **It is 5. So 6.**", "6"), ("The point is (-2, 5).", "(-2, 5)"),
    ("She makes 18 per day. 😊\n\nLet me know if you have 2 more questions!", "18"), ("He has 5 t-shirts.", "5"),
    ("So she has 7. I hope it is correct.", "7"), ("It is 1.5 million.", "1.5 million"), ("So x = 2 or x = 3.", "2, 3"),
    ("$$a + b = c + d$$\n" * 20 + "$$\n\\pi\n$$", "\\pi"), ("Hence it is \\(x = 5\\).", "x = 5"),
    ("She **pays 5** twice. So she pays 10.", "10"), ("**Total 5**\nSo it is 10.", "10"),
    ("**Step 3**: It is 18.", "18"),
    ("So it is *5*.<|im_end|>\n", "5")])
def test_the_last_sentence_has_the_answer_but_not_in_training(text, answer):
    assert extract_answer(text) == answer and extract_answer(text, closed_only=True) in (None, "5")


@pytest.mark.parametrize("text, answer", [
    ("2+5 = 7. So she has 7 apples.", "7"), ("She pays $9 twice.\nAltogether she pays $18.", "18"),
    ("9*2 = 18. Hence the pair is $(7, 6)$.", "(7,6)"), ("Fine. So we get 9 x $2 = $18.", "18"),
    ("9*2 = 18. Thus she has 18.", "18"), ("9*2 = 18. Therefore 18.", "18"), ("9*2 = 18. In total, 18.", "18")])
def test_an_answer_in_several_sentences_is_its_conclusion(text, answer):
    assert is_equivalent(text, answer) and not is_equivalent(text.replace(answer[-1], "4"), answer)


@pytest.mark.parametrize("farewell", [
    "Let me know!", "I hope this helps!", "Please feel free to ask.", "Feel free to ask.", "If you have 2 more, ask.",
    "If you need more, ask.", "Is there anything else?"])
def test_a_farewell_is_not_the_last_sentence(farewell):
    assert extract_answer(f"So she makes 18. {farewell}") == "18"


@pytest.mark.parametrize("text, answer", [
    ("18", "18"), ("**$1,234.50**", "1,234.50"), ("\\(3/4\\).", "3/4"), ("9*2=18</think>\n\n-.5\\%\n", "-.5\\%"),
    ("1,2", None), ("(18)", None), ("18 apples", None), ("1. 2", None), ("9\n18", None)])
def test_a_text_that_is_but_a_number_is_an_answer_but_not_in_training(text, answer):
    assert extract_answer(text) == answer and extract_answer(text, closed_only=True) is None


@pytest.mark.parametrize("text", ["So she has 7", "So she has 7.\nLet me check.", "So she has some.", "It is 3 - ",
                                  "She has 7. So there.", "So: 7.5", "The thirteenth glass is 5 * 1"])
def test_other_sentences_have_no_answer(text):
    assert extract_answer(text) is None


def test_of_a_long_text_the_end_counts():
    assert extract_answer("so " * 20_000 + "<answer>5</answer>") == "5"
    assert extract_answer("<answer>5</answer>" + "so " * 20_000) is None
    assert is_equivalent("a" * 500, " " + "a" * 500) and not is_equivalent("a" * 500, "a" * 499 + "b")


SAME = [
    # numbers
    ("1,234", "1234"), ("<answer>27.0", "27"), ("0.5", "1/2"), (".5", "\\frac12"), ("\\frac{3}{4}", "3/4"),
    ("\\dfrac34", "0.75"), ("2 1/2", "2.5"), ("2\\frac{1}{2}", "\\frac52"), ("2½", "2.5"), ("+5", "5"), ("−5", "-5"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"), ("0.\\overline{3}", "\\frac13"), ("0.1\\overline{6}", "1/6"),
    ("4\\frac{2}{3}", "\\frac{28}{6}"), ("-2\\frac12", "-2.5"), ("11,\\! 111", "11111"), ("14{,}916", "14916"),
    ("1.5 x 10^3", "1500"), ("\\sqrt[3]{2}", "2^{1/3}"), ("7.", "7.0"), ("1.5e3", "1500"),
    ("1.5\\times 10^3", "1500"), ("2^{10}", "1024"), ("12\\,345", "12345"), ("1,250.50", "1250.5"),
    # money, units, percent, degrees
    ("$18", "18"), ("\\$18.00", "18"), ("18 dollars", "18"), ("18 apples", "18"), ("18apples", "18"),
    ("9 (apples)", "9"), ("50\\%", "50"), ("5\\text{ cm}", "5"), ("8\\text{ cm}^2", "8"), ("5 miles per hour", "5"),
    ("30^{\\circ}", "30 degrees"), ("90^\\circ", "90"), ("5\\text{ cm}", "5 centimeters"),
    ("60 mph", "60 miles per hour"), ("16\\pi\\text{ cubic inches}", "16π"), ("12cm", "12"),
    ("8:34 PM", "8:34 \\text{ p.m.}"), ("12^{\\text{th}}\\text{ grade}", "12"), ("12 \\text{ gm}", "12 grams"),
    ("2.5\\text{ million}", "2,500,000"), ("5 m", "5"), ("10+5\\sqrt2\\text{ m}", "10+5\\sqrt2"), ("2√3 m", "2\\sqrt3"),
    ("16\\pi\\text{ m}^2", "16π"), ("2\\pi + 4 m", "4+2\\pi"), ("6 + 3 m", "3m+6"),
    ("1.5\\times10^{-3} m", "0.0015"), ("\\frac{37m}{4}", "\\frac{37}{4}m"), ("2m+1", "1+2m"),
    ("1,234 apples", "$1,234"), ("\\approx 18", "18"), ("10\\text{ a.m.}", "10 am"),
    # markup, and words around the answer
    ("18.", "18"), ("18。", "18"), ("**18**", "18"), ("$\\frac{1}{2}$", "0.5"), ("x = 5", "5"), ("\\text{(A)}", "A"),
    ("\\text{Tuesday}", "tuesday"), ("(C)", "\\text{C}"), ("\\text{B and C}", "C, B"), ("\\text{June 20}", "June 20"),
    ("**18** apples", "18"), ("f(2) = 5", "5"), ("\\textbf{(D)}\\ 8", "8"), ("3+3+2 = 8", "8"), ("*18*", "18"),
    ("#### 18", "\\boxed{18}"),
    ("x = \\frac{\\sqrt3}{3} \\approx 0.577", "\\frac{\\sqrt3}{3}"), ("f(2) \\approx 18", "18"), ("4210", "4210_5"),
    ("m\\angle A = 30^\\circ", "30"), ("\\mathrm{odd}", "Odd"), ("\\text{an ellipse}", "\\text{ellipse}"),
    ("choice C", "\\text{(C)}"), ("44 \\mod 83", "44 \\pmod{83}"), ("60˚", "60^\\circ"), ("\\huge{18}", "18"),
    ("36\\text{ in.}^2", "36\\text{ in}^2"), ("52_{\\text{8}}", "52_8"), ("(AB5)_{16}", "AB5_{16}"),
    (".1\\overline{6}", "0.1\\overline{6}"), ("USD 75", "75"), ("US$75", "75"), ("4 x $10 = $40", "40"),
    ("He has 3 x 2 = 6, total = 18", "18"),
    ("f'(2) = 5", "5"), ("(f \\circ g)(2) = 5", "5"), ("f \\left(2\\right) = 5", "5"), ("P (X=2) = 1/3", "1/3"),
    ("f(f(2)) = 5", "5"), ("g^{-1}(f(2)) = 5", "5"), ("f(1) - f(2) = 5", "5"), ("x_1 + x_2 = 5", "5"),
    ("5\\star1 = 9(5)+2 = 47", "47"), ("2 @ 3 = 5", "5"), ("So, $x = 5$.", "5"), ("Hence, $a = b = 5$", "5"),
    ("5\u200b", "5"), ("\ufeff5\u2060", "5"),
    # formulas
    ("f(x)=2x+3", "3+2x"), ("(x+1)^2", "x^2+2x+1"), ("11\\sqrt2", "11\\sqrt{2}"),
    ("\\frac{\\sqrt{3}}{2}", "\\sqrt3/2"), ("3\\sqrt{13}", "\\sqrt{117}"), ("\\sqrt[3]{8}", "2"), ("6-5i", "-5i + 6"),
    ("xy", "yx"), ("αβ", "βα"), ("\\frac\\pi2", "\\frac{\\pi}{2}"), ("\\pi2", "2\\pi"),
    ("\\sqrt[3]{2+\\sqrt5}+\\sqrt[3]{2-\\sqrt5}", "1"),
    ("4\\pi", "4π"), ("xy+z", "z+yx"), ("\\frac12 n(n+1)", "\\frac{n^2+n}{2}"), ("\\cos 2x", "\\cos(2x)"),
    ("2\\sin x\\cos x", "\\sin 2x"), ("\\sin(x)^2", "1-\\cos^2 x"), ("\\ln{x}^2", "2\\ln x"),
    ("x ** 2", "x^2"), ("3+\\dot x", "\\dot{x}+3"), ("3\\hat{i}+4\\hat{j}", "4\\hat j+3\\hat i"),
    ("\\frac{\\sinh(at)}{a}", "\\frac{1}{2a}(\\exp{a*t}-\\exp{-a*t})"),
    ("x/2", "\\frac x2"), ("\\tan^2 x", "(\\tan x)^2"), ("a_{1}+a_2", "a_2+a_1"),
    ("e^{2x}", "(e^x)^2"), ("\\frac{x}{y}", "xy^{-1}"),
    ("\\frac{1}{\\sqrt2}", "\\frac{\\sqrt{2}}{2}"), ("2^{2005}-1", "2\\cdot2^{2004}-1"), ("\\log_2 8", "3"),
    ("\\sqrt{-4}", "2i"), ("\\sin(-30^\\circ)", "-\\sin 30 ^{\\circ}"), ("\\tan(15^\\circ+30^\\circ)", "\\tan 45°"),
    ("5!", "120"), ("4!=24", "24"), ("x_1!=x_2", "x_1\\ne x_2"), ("\\binom{5}{2}", "10"),
    ("C(7, 4) * (1/5)^4 = 7/125", "\\frac{7}{125}"),
    ("2^{10} 3^5", "2^{10}\\cdot 3^5"),
    ("\\cos 60", "\\cos(60)"),
    # lists, sets, intervals, matrices, relations
    ("1,-2", "-2, 1"), ("1 and 2", "2, 1"), ("\\{1,2\\}", "\\{2, 1\\}"), ("1\\pm\\sqrt2", "1-\\sqrt{2},1+\\sqrt{2}"),
    ("(2,3]", "\\left(2,3\\right]"), ("x\\in[1,2]", "[1,2]"),
    ("(-\\infty,2)\\cup(3,\\infty)", "(3,\\infty) \\cup (-\\infty, 2)"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"),
    ("1, 2, and 3", "\\{3,1,2\\}"), ("x = 1 or x = -2", "1,-2"), ("x=\\pm2", "2,-2"),
    ("x \\in \\{2,3\\}", "x=2, x=3"), ("(1,2),(3,4)", "(3, 4) and (1, 2)"), ("(x,y)=(1,2)", "(1,2)"),
    ("\\{\\{1,2\\}\\}", "\\{\\{1, 2\\}\\}"), ("3\\mp\\sqrt2", "3\\pm\\sqrt2"),
    ("\\left[\\begin{array}{cc}1&2\\end{array}\\right]", "\\begin{bmatrix}1&4/2\\\\\\end{bmatrix}"),
    ("-2 < x < 3", "3 > x > -2"), ("y = 2x+3", "2x - y + 3 = 0"), ("x<3", "2x<6"), ("S = \\{1,2\\}", "S=\\{2,1\\}"),
    ("\\{1\\pm\\sqrt5,-2\\}", "\\{-2,1+\\sqrt5,1-\\sqrt5\\}"), ("3<\\lambda\\le4", "(3,4]"), ("λ \\in [1,2]", "[1,2]"),
    ("\\begin{pmatrix}7\\\\21\\end{pmatrix}", "(7,21)"), ("\\{x \\mid -2\\leq x<1\\}", "[-2,1)"),
    ("x<-2\\lor 1<x", "(-\\infty,-2)\\cup(1,\\infty)"), ("\\{x:x>3\\}.", "x>3"),
    ("\\begin{pmatrix}1\\\\[2pt]2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
    ("2 : 1", "2:1"), ("x>2", "2<x"), ("x>2", "(2,\\infty)"), ("-2 \\le x < 3", "x \\in [-2,3)"),
    ("x < 1 \\text{ or } x \\ge 2", "(-\\infty, 1) \\cup [2, \\infty)"), ("5 \\textnormal{ miles}", "5"),
    ("\\varnothing", "\\emptyset"), ("90 \\text{ square feet}", "90\\text{ ft}^2"),
    ("8 cubic centimeters", "8 cm^3"), ("2(1+3m)", "2+6m"), ("5 \\approx 5.01", "5"),
    ("v_{max}+1", "1+v_{max}"), ("\\frac{v^2_0}{2g}", "\\frac{v_0^2}{2g}"),
    ("x_iy_i", "y_i x_i"), ("x⁴", "x^4"), ("\\sin(\\pi)", "0"), ("\\sin^2(\\pi)", "0"), ("x = -5", "-5"),
    ("\\text{(C)} or 7", "7, C"), ("x_{12}=5", "5"), ("2 \\text{ logs}", "2"), ("12 tanks", "12"),
    ("2x+4y=6", "x+2y=3"), ("1010_2", "1010_{2}"), ("3:30", "3:30"),
    # m is a unit after a number, but not in a formula
    ("2m-3", "-3+2m"), ("5m^2+9m+8", "9m+8+5m^2"), ("3m^2+4", "4+3m^2"), ("3(m-2)", "3m-6"), ("2m/3", "\\frac{2m}{3}"),
    ("5m^2", "5"), ("5 m/s", "5"), ("9.8 m/s^2", "9.8"), ("5 m^{-2}", "5"), ("3 kg-m", "3"),
    ("5 km", "5 kilometres"), ("5 mm", "5 millimeters"), ("5 km/h", "5 kilometers per hour"), ("5 kg", "5 kilograms"),
    ("5 m", "5 meters"), ("5 L", "5 liters"),
    ("5 mg", "5 milligrams"),
    # other spellings, and symbols that are compared as text
    ("6 \\div 4", "3/2"), ("x \\lt 3", "3 \\gt x"), ("x \\neq 2", "2 \\ne x"), ("(1;2)", "(1,2)"), ("∞", "\\infty"),
    ("6 ÷ 4", "3/2"), ("2 · 3", "6"), ("5 — 3", "2"), ("\\tfrac12", "\\cfrac{1}{2}"), ("\\tbinom52", "10"),
    ("\\lvert-5\\rvert", "5"), ("\\vert -5\\vert", "5"), ("\\lbrace 1,2 \\rbrace", "\\{1,2\\}"), ("x ≡ 3", "x = 3"),
    ("x=1 \\vee x=2", "1,2"), ("x=1 ∨ x=2", "1,2"), ("∅", "\\{\\}"), ("1,\\dots,n", "1,...,n"),
    ("1,\\cdots,n", "1, ..., n"), ("5 millions", "5000000"), ("3 hundreds", "300"),
    ("2 hundred thousand", "200000"), ("\\mathbb R", "\\mathbb{R}"), ("\\mathbf v", "v"), ("\\Bbb Z", "\\mathbb{Z}"),
    ("\\{ x \\in \\mathbb{R} : x > 1 \\}", "(1,\\infty)"), ("x = n\\pi \\: ( n \\in \\mathbb{Z} )", "n\\pi"),
    ("\\{ k\\pi \\mid k \\in \\mathbb{Z} \\}", "\\{k\\pi|k\\in\\mathbb{Z}\\}"), ("\\ln {x} y", "y\\ln x"),
    ("\\frac {a_1}{b_1}", "\\frac{a_1}{b_1}"), ("\\dfrac1{x_1}+\\dfrac1{x_2}", "\\frac{1}{x_1}+\\frac{1}{x_2}"),
    ("\\sinh^{-1}(x)+C", "C+\\sinh^{-1}(x)"), ("\\frac{1}{2}\\sec^{-1}(x/2)", "\\frac12 \\sec^{-1}\\frac{x}{2}"),
    ("#### 3 (since x > 0)", "3"), ("The answer is always 5.", "5"), ("2.9\\times10^{-3}\\,\\text{m K}", "0.0029"),
    ("a1!=0", "a1≠0"), ("A \\leftrightarrow B", "B \\leftrightarrow A"),
    ("0 = x - 3y", "0 = 2x - 6y"), ("y = 2 sin x cos x = sin 2x", "\\sin 2x"),
    ("2⅓", "7/3"), ("1¾", "\\frac74"), ("½+¼", "3/4"), ("⅔", "2/3"), ("\\dbinom{5}{2}", "10"), ("f\\colon 3", "f:3"),
    ("⊢7", "⊢ 7"), ("3 thousand", "3000"), ("2·3", "6"), ("2⋅3", "6"),
    ("€5", "5"), ("£5", "5"), ("3 – 5", "-2"), ("x \\geq 2", "[2,\\infty)"), ("x \\leqslant 2", "(-\\infty,2]"),
    ("\\mathbb{R}", "ℝ"),
    # precedence, and each function
    ("-2^2", "-4"), ("2^3\\frac12", "4"), ("\\ln e", "1"), ("\\arcsin 1", "\\frac{\\pi}{2}"),
    ("\\arccos 1", "0"), ("\\arctan 1", "\\frac{\\pi}{4}"), ("\\sec x", "\\frac{1}{\\cos x}"),
    ("\\csc x", "\\frac1{\\sin x}"), ("\\cot x", "\\frac{\\cos x}{\\sin x}"),
    ("\\tanh x", "\\frac{\\sinh x}{\\cosh x}"), ("x = y + 1 = 5", "5"), ("(1,2)", "1,2"), ("(E) 5", "5"),
    # relations in brackets, factorials of letters, short and long units, characters that stand for several others
    ("\\{x=2\\}", "x=2"), ("(x = 5)", "5"), ("S = \\{1,2\\}", "1,2"), ("\\sum_{k=1}^{n} k", "x = \\sum_{k=1}^{n} k"),
    ("\\binom{n+1}{2}", "\\frac{n(n+1)}{2}"), ("\\frac{(n+1)!}{n!}", "n+1"),
    ("5 lbs", "5 pounds"), ("28 pct", "28 percent"), ("5 apples", "5 apples left"),
    ("60 mph", "60 miles/hour"), ("5 m/s", "5 meters per second"), ("⅛", "1/8"), ("10²³", "10^{23}"),
    # a short unit follows a number and a space; other letters belong to a formula
    ("477 N", "477"), ("18...", "18"), ("2.5 s", "2.5"), ("13.6 eV", "13.6"), ("3 A", "3"),
    ("5\\,\\mathrm{N}", "5 newtons"),
    ("2 h", "2 hr"), ("25^\\circ\\text{C}", "25"), ("98.6 °F", "98.6"), ("9.8 m s^{-2}", "9.8"), ("2s+1", "1 + 2 s"),
    ("\\frac{1}{2} m v^2", "\\frac{mv^2}{2}"), ("\\frac{1}{3}\\pi h", "\\frac{\\pi h}{3}"),
    ("\\frac{\\sqrt3}{4} s^2", "\\frac{s^2\\sqrt3}{4}"), ("864 in^2", "864\\mbox{ inches}^2"), ("5 sq. units", "5"),
    ("50¢", "50 cents"), ("3 vitamin C tablets", "3"), ("\\text{(B)}.", "B"),
    ("f(-2) = 5", "5"), ("f\\left(\\frac12\\right) = 5", "5"), ("P(X = 4) = \\frac12", "0.5"), ("f^{-1}(3) = 5", "5"),
    # older and rarer LaTeX
    ("1,2,\\ldots,n", "1, 2, ..., n"), ("\\langle 3, 4 \\rangle", "(3,4)"),
    ("\\tan^{-1} 2", "\\arctan 2"), ("\\sin^{-1}\\frac13", "\\arcsin(1/3)"),
    ("\\{x \\in \\mathbb{R} \\mid x \\ge 0\\}", "[0,\\infty)"),
    ("x\\in(-\\infty,2)\\text{ or }x\\in(3,\\infty)", "(-\\infty,2)\\bigcup(3,\\infty)"),
    ("(x,y) \\in \\{(1,2),(3,4)\\}", "(3,4),(1,2)"), ("\\{x \\mid x \\ne 3\\}", "x \\neq 3"),
    ("(1010)_2", "1010_2"), ("1010 \\text{ (base 2)}", "1010_{2}"), ("1010\\text{ base 2}", "1010"),
    ("1010\\text{ in base 2}", "1010_2"), ("1010\\ (\\text{in base }2)", "1010_2"),
    ("\\frac72 \\text{ or } 3.5", "\\frac{7}{2}"), ("17/3 or 5 2/3", "\\frac{17}{3}"), ("0.5, 1/2", "1/2"),
    ("\\boldsymbol{5}", "5"), ("\\bf 5", "5"), ("\\textsf{Navin}", "Navin"), ("5\\rm\\ cm", "5"),
    ("0.1\\bar{6}", "1/6"), ("0. \\overline{6}", "2/3"), ("x_{1,2}=6\\pm\\sqrt5", "6\\pm\\sqrt5"),
    ("5 lb", "5 pounds"), ("5 lbs", "5 pounds"), ("3 oz", "3 ounces"), ("1 foot", "1 feet"),
    ("Thus there are 18 eggs left.", "18"), ("Therefore the height is 2 x 17 = 34 feet.", "34"),
    ("\\bar{x}", "\\overline{x}"), ("1,2", "[1,2]"),
    ("P = \\frac13\\begin{pmatrix}1&2\\\\2&4\\end{pmatrix}", "\\begin{bmatrix}1/3&2/3\\\\2/3&4/3\\end{bmatrix}"),
    ("-\\begin{pmatrix}1\\\\-2\\end{pmatrix}", "(-1,2)"),
    ("f(x) = 1 \\text{ for all } x \\in \\mathbb{Q}", "f(x)=1"), ("2k\\pi,\\ k \\in \\mathbb{Z}", "x = 2k\\pi"),
    ("n\\pi, \\text{ where } n \\text{ is an integer}", "n\\pi"), ("\\text{for all } x", "for all x"),
    ("\\text{Area: } 12", "12"), ("\\text{Minimum: } 1, \\text{ maximum: } 3", "1,3"),
    ("\\frac{10!}{3!7!}", "\\binom{10}{3}"), ("12 mi/hr", "12 mph"), ("5 yd", "5 yards"), ("5 mi", "5 miles"),
    # a digit after a bracket, a power after a letter, bars as factors
    ("n2^{n-1}", "n\\cdot 2^{n-1}"), ("(n-1)2^n+1", "1+(n-1)2^n"), ("2^{3}3^{2}", "72"),
    ("\\frac{1}{2}3^n", "\\frac{3^n}{2}"), ("2|x|+1", "1+2|x|"), ("\\ln|x|", "\\ln(|x|)"),
    # multiple choice
    ("(D) Ellipse", "\\text{(D)}"), ("\\textbf{(A)}\\ 45", "A"), ("A) 45", "A"), ("A)", "A"), ("A. 45", "(A)"),
    ("option A", "A"),
    # a sentence with a single number
    ("Janet makes $18 every day at the market.", "18"), ("18 dollars at the farmers' market", "18"),
    ("The total cost is **$1,234.50**", "1234.5"),
    ("The area is 20 square feet", "20"), ("So she needs 1/2 cup.", "0.5"), ("\\text{The value is } 5", "5"),
    # Unicode characters
    ("(1+i√3)/2", "\\frac{1+i\\sqrt3}{2}"), ("√13/2", "\\frac{\\sqrt{13}}{2}"), ("√x", "\\sqrt{x}"), ("₹45", "45"),
    ("x₁", "x_1"),
    ("θ = π/3", "\\theta=\\frac{\\pi}{3}"), ("α+β", "\\alpha+\\beta"), ("\\varepsilon", "\\epsilon"), ("\"45\"", "45"),
    # words and systems
    ("3.6\\times 10^{5}\\text{ J}", "360000"), ("\\frac{3}{4}\\text{ of a cup}", "3/4"), ("about 45", "45"),
    ("(0,\\pm 3)", "(0,3),(0,-3)"), ("\\{(1,2)\\}", "(1,2)"), ("x\\in\\mathbb{R}", "(-\\infty,\\infty)"),
    ("all real numbers", "\\mathbb{R}"), ("\\text{All real numbers}", "\\mathbb{R}"),
    ("\\mathbb{R} \\setminus \\{2\\}", "(-\\infty,2)\\cup(2,\\infty)"),
    ("\\text{All real numbers except } \\{-7, 3\\}", "(-\\infty,-7)\\cup(-7,3)\\cup(3,\\infty)"),
    ("(-inf,2) U (3,\\infty)", "(-\\infty,2)\\cup(3,\\infty)"),
    ("1 \\pm \\sqrt{19}.", "1+\\sqrt{19}, 1-\\sqrt{19}"), ("\\frac{\\sqrt{3}}3", "\\frac{1}{\\sqrt3}"),
    ("\\log_23", "\\log_2 3"),
    ("\\textbf{(B)}\\ 1,234", "1234"), ("\\sqrt13", "\\sqrt{13}"), ("\\sqrt[3]{-8}", "-2"), ("(-8)^{2/3}", "4"),
    ("He ran 3 + 16 = 19 miles.", "19"), ("So, she saved $36 - $15 = $21.", "21"),
    ("Therefore, 10 liters of water were left.", "10"),
    ("y = 4, x = 3", "(3,4)"), ("x \\ne 2 \\text{ and } x \\ne 3", "(-\\infty,2)\\cup(2,3)\\cup(3,\\infty)"),
    ("\\begin{pmatrix}1 \\\\[0.3em] 2\\end{pmatrix}", "\\begin{pmatrix}1 \\\\ 2\\end{pmatrix}"),
    ("(1,2]", "(1,\\frac42]"), ("\\{1, 2\\}", "{2, 1}"), ("\\ln 2^3", "3\\ln 2"), ("The sum is -5", "-5"),
    ("|x-1|", "\\left|1-x\\right|"), ("|-5|", "5"), ("|1-\\sqrt2|", "\\sqrt2-1"),
    ("\\begin{cases} x=5 \\\\ y=2 \\end{cases}", "x=5,y=2"), ("x\\neq 2", "(-\\infty,2)\\cup(2,\\infty)"),
    # spellings of old TeX, of time, and of what an answer is modulo
    ("{-}50", "-50"), ("\\text{-}7", "-7"), ("89{}^\\circ", "89"), ("{1 \\over 2}", "0.5"), ("{5 \\choose 2}", "10"),
    ("\\color{red}{2}", "2"), ("\\large 2", "2"), ("1.\\overline7", "16/9"), ("0.\\dot{3}", "1/3"), ("07:30", "7:30"),
    ("5 PM", "5:00 p.m."), ("44 \\pmod{83}", "44"), ("x \\equiv 44 \\pmod{83}", "44 (\\text{mod } 83)"),
    ("\\nicefrac{3}{4}", "0.75"), ("\\sin^2 30^\\circ", "1/4"), ("\\cos 60° = \\frac12", "0.5"),
    ("12\\text{ yr}", "12 years"), ("12min", "12"), ("$1,400/month", "1400 per month"), ("5 litres", "5 liters"),
    ("50 \\frac{\\text{miles}}{\\text{hour}}", "50 mph"), ("25^\\circ C", "25 degrees Celsius"), ("12 hundred", "1200"),
    ("5 trillion", "5000000000000"), ("3 N m", "3"), ("5 N m^2", "5"), ("12 V A", "12"),
    ("\\frac{1}{2} C V^2", "\\frac{CV^2}{2}"), ("I = \\frac{1}{2} m R^2", "\\frac{mR^2}{2}"),
    ("\\ln(x-2)+\\ln(x-3)", "\\ln(x^2-5x+6)"), ("2\\ln(x-2)", "\\ln((x-2)^2)"),
    ("(m_1+m_2)\\mu g", "\\mu g(m_1+m_2)"), ("n^2+2 nm", "n^2+2mn"),
    ("(\\pm1,\\mp1)", "(1,-1),(-1,1)"), ("3\\mp\\sqrt2", "3\\pm\\sqrt2"),
    ("\\text{The set of all real numbers}", "\\mathbb{R}"),
    ("v^2/g", "\\frac{v^2}{g}"), ("\\sin{30^\\circ}", "\\sin 30^\\circ"), ("12:00", "12:00 PM"), ("2^{}", "2"),
    ("The value of $x$ is 5.", "5"), ("The area is $12\\pi$.", "12\\pi"), ("Therefore, William makes $18 a day", "18"),
    ("$18/day", "18"), ("\\$18/\\text{day}", "18"), ("$18 a day", "18"), ("160 GB", "160"),
    ("sqrt(3)/sqrt(a)", "\\sqrt{3/a}"), ("He pays 9 eggs x $2/egg = $18 a day.", "18"),
    ("The remainder when $10$ is divided by 3 is 1", "1"),
    ("That leaves 4 ducks + 5 ducklings = 9 birds that Tom's dog saw.", "9"),
    ("So she has 8 - 3 = 5 more than Al.", "5"),
    ("\\mathbf{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt3}{2}"), ("\\mathbf{5\\text{ cm}}", "5"),
    ("$8/lb", "8"), ("Mr. Smith and Mary have 8 apples.", "8"),
    ("On average, he spent $8 there.", "8"), ("Tom has 8 more than Tim.", "8"), ("I have 15.", "15"),
    ("The merchant’s profit would be $125.", "125"), ("Thus the number of eggs is 8.", "8"),
    ("The man makes $8/day", "8"),
    ("(\\textbf{E})\\ 12", "E"), ("\\begin{cases}x=2,\\\\ y=-1\\end{cases}", "x=2, y=-1"), ("3{:}55", "3:55"),
    ("A^{-1} = \\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
    ("\\ln 2 \\approx 0.693", "\\ln 2"), ("6e^{i3\\pi/2}", "-6i"), ("\\log 10^3", "3"), ("1,000, 2,000", "1000, 2000"),
    ("x <= 5", "x \\le 5"), ("x >= 5", "[5,\\infty)"), ("1,000/3", "1000/3"), ("nπ, n ∈ Z", "n\\pi"),
    ("2^6 3^5", "2^6*3^5"), ("He gave $100 + $60 = $160 to the shelter", "160"), ("She has 4 x .5 = 2 pies", "2"),
    ("{1\\over2}", "\\frac12"), ("5/36 (approximately 0.139)", "\\frac{5}{36}"),
    ("D. Vitamin D", "D"), ("C) Both A and B", "C"), ("A. Hepatitis B.", "A"), ("(F) 12 J", "F"), ("(G) 5 cm.", "5 cm"),
    ("Yes, it converges.", "Yes"), ("\\text{No, it is not}", "No"), ("True; all are.", "true"), ("HEADS", "heads"),
    ("No, it is 5", "5"),
    ("x=\\frac{\\pi}{4}+k\\pi(k \\in \\mathbb{Z})", "x = k\\pi + \\frac{\\pi}{4}, k \\in \\mathbb{Z}"),
    ("a_{n}=2n-1(n\\in\\mathbf{N}^{*})", "a_n = 2n-1"), ("[k\\pi, k\\pi+1], k \\in \\mathbb{Z}", "[k\\pi, k\\pi+1]"),
    ("x=2 \\text{ or } x=3", "x_{1}=2, x_{2}=3"), ("x = 2, 3", "x_{1}=2, x_{2}=3"), ("(1,2)", "x=1, y=2"),
    ("x_{1,2}=1 \\pm \\sqrt{2}", "x = 1 \\pm \\sqrt{2}"), ("0.(3)", "1/3"), ("1.(6)", "5/3"),
    ("\u20115", "-5"), ("\\text{non\u2011negative}", "non-negative"),
    ("\\frac{5}{36} (\\approx 0.139)", "\\frac{5}{36}"), ("2\\sqrt2\\text{ units (or about }2.83)", "2\\sqrt2"),
    ("n=4, k=3", "(n, k) = (4, 3)"),
    ("z=2, x=1", "(1,2)"), ("m=3, b=2", "(3,2)"), ("(y,x) = (2,1)", "(2,1)"), ("\\sum_{k=1}^{10} a_k = 37", "37"),
    ("\\prod_{k=1}^{3} k = 6", "6"), ("\\int_0^1 f(x)\\,dx = 2", "2"),
    ("\\lim_{x \\to 0} f(x) = \\frac32", "1.5"), ("\\lfloor 37.5 \\rfloor = 37", "37"),
    ("\\lceil 36.5 \\rceil = 37", "37"), ("10\\text{:}30\\text{ a.m.}", "10:30 AM"),
    # as NuminaMath and other collections write answers
    ("\\left\\{\\begin{array}{l}x=3 \\\\ y=-1\\end{array}\\right.", "x=3, y=-1"), ("{a}_{n}=2n+1", "a_n = 2n+1"),
    ("\\begin{cases}1 & \\text{if } n=1 \\\\ n & n>1\\end{cases}", "\\begin{cases}1, & n=1 \\\\ n, & n>1\\end{cases}"),
    ("x \\geqslant -1 \\text{ and } x \\neq 0", "[-1,0)\\cup(0,\\infty)"), ("x<2, x \\ne 1", "(-\\infty,1)\\cup(1,2)"),
    ("\\operatorname{arctg} x", "\\arctan x"), ("\\lg 100", "2"), ("\\overrightarrow{AB}", "\\vec{AB}"),
    ("\\text{Rs. } 400", "400"), ("D)1/2", "D"), ("(E)None of these", "E"), ("A \\cap B = \\{x | 1<x<2\\}", "(1,2)"),
    ("\\text{the third quadrant}", "third quadrant"), ("x_1=2, y_1=3; x_2=3, y_2=2", "(2,3), (3,2)"),
    ("\\exists x_{0} > 1", "\\exists x_0 > 1"), ("(iii)", "iii"), ("k \\ne 0, k<4", "k<4, k \\ne 0"),
    ("\\left\\{\\begin{pmatrix}1\\\\2\\end{pmatrix}, \\begin{pmatrix}3\\\\4\\end{pmatrix}\\right\\}", "(3,4), (1,2)"),
    ("\\sqrt{\\frac{n}{n-1}}", "\\frac{\\sqrt{n}}{\\sqrt{n-1}}"), ("\\vec v_1+\\vec v_2", "\\vec v_2+\\vec v_1"),
    ("\\begin{cases}x=1, y=2\\end{cases}", "x=1, y=2"), ("\\mathrm{Rs}.\\ 400", "Rs. 400"),
    ("A \\cup B = [1,2]", "[1,2]"),
    # which letter stands for any integer is a matter of taste
    ("\\frac{\\pi}{6}+n\\pi, n\\in\\mathbb{Z}", "x = k\\pi + \\frac{\\pi}{6} \\text{ for any integer } k"),
    ("The solutions are $x = n\\pi$.", "k\\pi"), ("y=2n\\pi", "2\\pi k"), ("(D) $n\\pi$", "k\\pi"), ("n pi", "n\\pi"),
    ("t = n\\pi \\text{ or } t = \\frac{\\pi}{6}+2n\\pi", "n\\pi, \\frac{\\pi}{6}+2n\\pi"), ("2mn\\pi", "2m\\pi n"),
    ("x = n\\pi \\text{ for } n \\in \\mathbb{Z}", "n\\pi"), ("b_n = \\frac{2}{n\\pi}", "\\frac{2}{n\\pi}"),
    ("\\{x \\in \\mathbb{R} \\mid x \\neq n\\pi, n\\in\\mathbb{Z}\\}", "x \\ne n\\pi"), ("n\\pi\\text{ rad}", "n\\pi"),
    ("\\sin(n\\pi x)", "\\sin(nx\\pi)"), ("[2k\\pi, 2k\\pi+\\pi]", "[2n\\pi, 2n\\pi+\\pi]"),
    ("①、③、④", "①③④"), ("x=1、x=2", "x=2 \\text{ or } x=1"), ("The domain is all real numbers.", "\\mathbb{R}"),
    # sentences that begin with a number
    ("18 eggs per day * $2 = $36", "36"), ("400 ounces / 16 ounces per pound = 25 pounds.", "25"),
    ("So, 8 pens + 7 pens = 15 pens", "15"),
    # words for numbers, signs, ratios and for no solution; an equation that begins with its number; a last backslash
    ("five", "5"), ("18 fifth graders", "18"), ("48 half-dollars", "48"), ("Twenty", "20"),
    ("\\text{Twelve}", "12"), ("x = two", "2"),
    ("negative 11", "-11"), ("Minus 1/2.", "-\\frac12"), ("5 \\text{ to } 2", "5:2"), ("11 = x", "11"),
    ("-2.5 = y", "-5/2"), ("\\text{No solution}", "\\text{There are no real solutions.}"),
    ("No solutions", "\\varnothing"), ("A \\cap B = \\{\\}", "\\{\\}"), ("\\{\\}", "\\text{the empty set}"),
    ("The number of students who didn't pass is 12", "12"), ("So 20 - 8 = 12 people don't know that", "12"),
    ("So 20 - 8 = 12 students didn't pass", "12"),
    # equations beside or below each other; what is said behind an answer; other alphabets; raised letters
    ("x = 2 \\quad x = 3", "2, 3"), ("x = 3 \\quad \\text{or} \\quad x = -2", "-2, 3"), ("x=2 \\\\ x=3", "2, 3"),
    ("x = 2\n- x = 3", "2, 3"), ("x = 10/2\nx = 5", "5"),
    ("\\begin{aligned} x &= 1 \\\\ y &= 2 \\end{aligned}", "(1,2)"),
    ("f(x) = 5 \\text{ at } x = 3", "5"), ("120 (= 5!)", "120"), ("a_n = 2n+1 \\quad (n \\ge 1)", "2n+1"),
    ("100m + n = 517", "517"), ("12\\ \\textbf{(C)}", "C"), ("C (12)", "12"), ("5\\tag{1}", "5"),
    ("\\sqrt{2}:1", "\\sqrt2:1"), ("25 \\frac{\\text{km}}{\\text{h}}", "25 km/h"),
    ("x=1或x=2", "1, 2"), ("12 \\text{ años}", "12"), ("5ᵗʰ", "5th"),
    ("t = 2 \\text{ hours} = 120 \\text{ minutes}", "120"), ("V = 2abc = 60", "60"), ("2 = 4/2 = 2", "2"),
    ("x = 6/2 \\implies x = 3", "3"), ("A = \\pi r^2\nA = 9\\pi", "9\\pi"), ("AB = 5 + 7\nAB = 12", "12"),
    ("S = 2S - S = 1023", "1023"), ("2√3 + 1 m", "2\\sqrt3+1"), ("[\\sqrt2, 2] (≈ 3)", "[\\sqrt2,2]"),
    ("total = 3*4 = 12\nleft = 12-5 = 7", "7"),
    ("2ⁿ⁺¹", "2^{n+1}"), ("eˣ", "e^x"), ("aₙ = 2n", "a_n = 2n"),
    ("C = 2\\pi r = 6\\pi", "6\\pi"), ("A = \\frac12 b h = 12", "12"),
    ("18\\\\", "18"), ("2^3^2", "512"), ("e^x^2", "e^{x^2}"),
    ("x != 2", "x \\ne 2"), ("\\sqrt{x} = 3", "x^{1/2} = 3"), ("5 125/128", "765/128"), ("\\binom52", "10"),
    ("\\lambda_1+\\lambda_2", "\\lambda_2+\\lambda_1"), ("\\sin(n\\pi x)", "\\sin(k\\pi x)"), ("5 billion", "5*10^9"),
    ("\\mathbb{R} - \\{2\\}", "\\mathbb{R} \\setminus \\{2\\}"), ("\\mathbb{R} \\backslash \\{2\\}", "x \\ne 2"),
    ("\\left\\{\\begin{matrix}x=3 \\\\ y=-1\\end{matrix}\\right.", "x=3, y=-1"), ("$18/hr", "18"), ("5 kHz", "5"),
    ("\\begin{cases}1 & (n=1) \\\\ n & (n>1)\\end{cases}", "\\begin{cases}1, & n=1 \\\\ n, & n>1\\end{cases}"),
    ("f(x) = 5 \\text{ when } x = 3", "5"), ("y = \\frac23 \\text{ of } x = 12", "12"), ("approximately 5", "5"),
    ("the total cost is $20", "20"), ("He paints 20 square feet a day", "20"), ("The roots are 1 and 2.", "1, 2"),
    ("The sum equals $2\\pi$", "2\\pi"), ("She used 1/2 + 1/4 = 3/4 cup of sugar", "3/4"),
    ("So he has 1200+600=1800 square feet of rooms", "1800"), ("C. Neither A nor B", "C"), ("False, it is 5", "false"),
    ("C = 2 pi r = 6 pi", "6\\pi"), ("y = \\frac23 \\text{ times } x = 12", "12"),
    ("\\ln{2}x", "x\\ln 2"), ("\\sin x(x+1)", "(x+1)\\sin x"), ("\\operatorname{arcctg} x", "\\cot^{-1} x"),
    ("\\begin{cases}x=1 \\\\ y=2\\end{cases} \\text{ or } \\begin{cases}x=2 \\\\ y=1\\end{cases}", "(1,2),(2,1)"),
    ("{\\overline x}", "\\overline{x}"), ("She has 5 left. So it is enough.", "5"),
    ("\\varphi", "\\phi"), ("λ = 3", "\\lambda=3"), ("5 AM", "5:00 a.m."),
    ("x<2, x \\ne 1", "x<1 \\text{ or } 1<x<2"), ("x>0 \\text{ and } x \\ne 1", "(0,1)\\cup(1,\\infty)"),
    ("\\sqrt5(y-n)^2", "\\sqrt5y^2-2\\sqrt5yn+\\sqrt5n^2")]  # y and n stand for close numbers: the terms nearly cancel


@pytest.mark.parametrize("a, b", SAME)
def test_the_same_answer_written_another_way(a, b):
    assert is_equivalent(a, b) and is_equivalent(b, a)


@pytest.mark.parametrize("a, b", [
    ("1,23", "123"), ("234", "1,234"), ("181", "18"), ("18", "-18"), ("12", "1 2"), ("1000", "1000.1"),
    ("8 square feet", "8 feet"), ("3<x<5", "3, 5"), ("x<3", "-\\infty,3"), ("1<x<2", "(1,2]"),
    ("x<1", "(1,\\infty)"), ("x=3", "(3,\\infty)"), ("x \\ne 3", "(3,\\infty)"), ("x<y", "(3,y)"),
    ("18 or 19", "18"), ("50", "0.5"), ("50%", "0.5"), ("3.1416", "\\pi"), ("1/3", "0.3333"), ("\\sqrt{2}", "1.414"),
    ("2\\frac12", "1"), ("6 + 3 m", "9"), ("5 cm", "5 cm^2"), ("\\frac{3}{4}", "\\frac{4}{3}"), ("6+5i", "6-5i"),
    ("x", "y"), ("2x+3", "2x+4"), ("(2,3]", "[2,3)"), ("(2,3)", "(3,2)"), ("1,2", "1,2,3"), ("x>2", "x<2"),
    ("x>2", "x\\ge2"), ("x<3", "-x<-3"), ("x=5", "y=5"), ("\\infty", "-\\infty"), ("e", "2.718281828"),
    ("12345678901234567890", "12345678901234567891"), ("0.\\overline{3}", "0.3"),
    ("0.\\overline{3}", "0.\\overline{4}"), ("9**9**9", "999"), ("1", "1.0001"), ("1,2,2", "1,1,2"), ("(2,1)", "1,2"),
    ("ABC", "CAB"), ("HHT", "THH"), ("T F", "F T"),
    ("3:30", "1/10"), ("8:34 PM", "-8:34 PM"), ("x_1", "x_2"), ("x + 5 m", "x + 5"), ("-x=5", "5"),
    ("e^{-40}", "e^{-50}"), ("1/\\infty + 5", "5.000001"), ("x_1^2", "x_2^2"), ("10 \\sqrt2", "10 \\sqrt3"),
    ("{1,2", "1,2}"), ("\\text{June 20}", "June 21"), ("5 am", "5 pm"), ("300!", "200!"),
    ("So 2x = 10", "10"), ("So the circle is x^2 + y^2 = 25", "25"),
    ("He does not pay 9 eggs x $2 = $18", "18"), ("They sell 3 boxes x 2 = 6 dozen", "6"),
    ("5 m", "5 cm"), ("2/sqrt(a)", "2"), ("2/arcsin(a)", "2"), ("5 min", "5 miles"), ("1 < 2", "(1,2)"), ("x=y", "0=0"),
    ("7/2 or 3.6", "7/2"), ("1010 in base 2", "1010_3"), ("A or B", "A"), ("1, 2", "1, 2, 2"),
    ("5 km or 5 cm", "5"), ("1010_2 or 1010_3", "1010"), ("2, 2, 2", "2"),
    ("421", "4210_5"), ("2516_9", "2516_8"), ("5 million", "5"), ("x+3m", "x+3"), ("3+3 = 5", "5"), ("12^{th}", "13"),
    ("\\sqrt2 \\approx 1.41", "1.41"), ("(A) 5", "(B)"), ("(A) 5", "(A) 6"), ("\\dot{x}", "x"), ("(A) B", "A"),
    ("(A) 5, (B) 6", "5"), ("B)", "A"),
    ("5⊢7", "5"), ("x_{1} \\approx 1.5", "x_{1} \\approx 99"), ("t_{1/2} ≈ 5", "t_{1/2} ≈ 12"),
    ("\\sqrt2 \\approx 1.41, \\sqrt3 \\approx 1.73", "\\sqrt2"), ("3+5m", "8"), ("2 ** 3", "2 3"), ("5 Million", "5"),
    ("e^{-x^2}", "0"), ("e^{-8x}\\cos(9x)", "0"), ("1\\pm\\sqrt5,-2", "1\\pm\\sqrt5,2"), ("\\sin(x)^2", "\\sin(x^2)"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}"), ("\\{x|x>3\\}", "x \\ge 3"),
    ("2m-3", "2"), ("2m/3", "2"), ("3L/2", "3"), ("4g-2", "4"), ("2g(3)", "2"), ("5 m", "5 mm"), ("5 m", "5 ml"),
    ("5 m", "5 minutes"), ("5 m", "5 miles"), ("5 g", "5 gallons"),
    ("a+d", "b+c"), ("p+s", "q+r"), ("a-b", "y-z"), ("2k", "j+l"), ("2:00", "8"), ("1:00", "1"), ("x_0", "x^3"),
    ("x_1+x_4", "x_2+x_3"), ("x_1+y_2", "x_2+y_1"),
    ("x\\le3", "-x\\le-3"), ("5 mm", "5 meters"), ("X", "x"), ("2.5!", "2"), ("1234,567", "1234567"),
    ("(A) (C)", "(C)"), ("", ""), ("None", None),
    ("x=5", "x+2=7.5"), ("2x=10", "10"), ("\\infty", "5"), ("(2,\\infty)", "(2,5)"), ("2xy", "2"), ("2 x", "2"),
    ("A", "B"), ("Tuesday", "Monday"), ("3:30", "3:31"), ("1010_2", "1010_3"), ("", "5"), (None, "5"),
    ("(-1)^a", "(-1)^f"), ("(-1)^F", "1"), ("(-3)^{-1}", "-0.33333333333333333"),
    ("x(x+2) = 15", "15"), ("x^{-1} = 5", "5"), ("f(x)+2 = 5", "5"), ("f(-2) = 5", "-5"),
    ("5 cents", "5 cm"), ("1, 2, 3, ...", "1, 2, 3"), ("1, 2, 3, \\ldots", "1, 2, 3"), ("3A", "3"), ("2 y", "2"),
    ("1 + 2 s", "3"), ("x + 3 s", "x + 3"), ("3 C", "3 F"), ("5 s", "5 h"), ("5 K", "5"), ("0.5 m v^2", "0.5"),
    ("2 m n", "2"), ("5 grams", "5 kilograms"), ("5 meters", "5 millimeters"), ("5 m", "5 micrometers"),
    ("5 mi", "5 mm"), ("(m_1+m_2)\\mu g", "m_1+m_2"), ("m^2+n^2-2 nm", "m^2+n^2-2"),
    ("5 trillion", "5"), ("2 thirds", "2"), ("3 fifths", "3"), ("3 factorial", "3"),
    ("\\frac{1}{2} C V^2", "\\frac12"), ("\\frac{2}{5} m R^2", "\\frac25"), ("2 g h", "2"), ("2 m h", "2 m H"),
    ("(\\pm1,\\mp1)", "(1,1),(-1,-1)"), ("(\\pm1,\\mp1)", "(\\pm1,\\pm1)"), ("\\pm1\\mp2", "3,-3"),
    # where letters stand for large numbers, rounding would hide the smaller term
    ("C_1 e^{2x}+C_2 e^{-3x}", "C_1 e^{2x}+C_2 e^{-4x}"), ("C_1 e^{4x}+C_2 e^{-x}", "C_1 e^{4x}+C_2 x e^{-x}"),
    ("\\frac{1}{5}e^{5x}+C", "\\frac{e^{5x}}{5}"),
    ("\\frac{1}{2}e^{x^2}+C", "\\frac{1}{2}e^{x^2}"), ("2e^{x^2}-1", "2e^{x^2}+1"), ("2e^{5x}-3", "2e^{5x}+3"),
    ("3e^{-5x}+2", "2"), ("\\cosh 3x", "\\sinh 3x"), ("\\tanh 4x", "1"),
    ("\\frac{4\\cdot 10^{2n}-4}{9}", "\\frac{4\\cdot 10^{2n}}{9}"), ("100^n-1", "100^n"), ("2024^n+1", "2024^n-1"),
    ("2^{8n}-1", "2^{8n}+1"), ("(n^2)!-1", "(n^2)!"), ("1-(\\frac{1}{365})^n", "1"),
    ("15 mm^2", "15 m^2"), ("3 kg-m", "3 kg-cm"), ("5 m", "5 m/s"), ("5 miles", "5 mph"), ("5 m^2", "5 m^{-2}"),
    ("9**9**9", "1"), ("__import__('os').system('true')", "0"), ("1/0", "1/0 + 1"), ("\\tan^{-1} x", "\\cot x"),
    ("\\{x \\in \\mathbb{Z} \\mid x > 0\\}", "(0,\\infty)"), ("(1010)_2", "1010_3"), ("1010 base 2", "1010 base 3"),
    ("2,5", "(2,5]"), ("[2,5)", "2,5"),
    ("2\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("1 \\text{ for all } x, 2", "1"), ("\\text{for all } x", "\\text{for all } y"),
    ("\\text{ratio: } 3:2", "2"), ("\\text{Area: } 12", "21"), ("5 mi", "5 min"), ("5 mi", "5 minutes"),
    ("The remainder is x - 3", "3"), ("The area is 16 pi square feet", "16"), ("It is not 18", "18"),
    ("It is never 18", "18"), ("I do not think it is 18", "18"), ("18 squared", "18"),
    ("The value is minus 5", "5"), ("The value is 5 sqrt x", "5"), ("The value is 5!", "5"),
    ("The total is 3 / x", "3"), ("The roots are 5 and x", "5"), ("The total is 5 hundred", "5"),
    ("There are less than 18", "18"), ("The value of x is not 5", "5"), ("The area is 12\\pi", "12"),
    ("44 \\pmod{83}", "44 \\pmod{84}"), ("44 \\pmod{83}", "45"), ("17 \\bmod 5", "17"), ("12 hundred", "12"),
    ("5 PM", "5:00 AM"), ("\\sin 30^\\circ", "\\sin 30"), ("12 min", "12 sec"), ("5 litres", "5 metres"),
    ("v^2/g", "v^2"), ("5/m", "5"), ("It is false that f is odd", "odd"), ("The total is 5 and the rest is 3", "3"),
    ("90 degrees", "90 radians"),
    ("Janet makes 18 from 9 eggs", "18"), ("Janet makes 18 every day", "81"), ("The answer lies near 3.5x", "3.5"),
    ("All real numbers except 3", "3"), ("The value is x^2 + 3", "3"), ("The ratio is 3:4", "3"),
    # what stands beside a name is compared to the last digit
    ("a_n=2^n", "a_n=2^{n-1}"), ("z_1=1+i", "z_1=1-i"), ("R_1=\\frac{\\pi}{2}", "R_1=\\frac{\\pi}{3}"),
    ("t_{1/2}=\\ln 2", "t_{1/2}=\\ln 3"),
    ("y=C_1 e^x+x", "y=C_1e^x-x"), ("x_1+\\sqrt2", "x_1+\\sqrt3"), ("x_1>\\pi", "x_1>e"), ("x=e^{-40}", "x=e^{-50}"),
    ("x_1=\\sqrt2, x_2=\\sqrt3", "x_1=\\sqrt3, x_2=\\sqrt2"), ("a_n", "a_n+\\pi"),
    ("f(x)=|x|", "f(x)=x"), ("\\ln|x|+C", "\\ln x+C"), ("|x|<2", "x<2"), ("A<B>C", "A>B>C"), ("x₁+x₂", "3x"),
    ("x2", "2x"), ("A1", "A"), ("\\lfloor n/2 \\rfloor", "\\lfloor n/3 \\rfloor"), ("|x|+|y|", "|x+y|"),
    ("listen", "silent"), ("-2<x+1<3", "(-2,3)"), ("1<x<3", "1<x<4"), ("2\\sin A", "2"), ("2 sin A", "2"),
    ("The value is log 8", "8"), (",".join(map(str, range(21))), ",".join(map(str, range(20, -1, -1)))),
    ("5\\star1 = 47", "5"), ("It is not 2 + 3 = 5.", "5"), ("So she has 7. But she lost some.", "7"),
    ("y = 3, x = 4", "(3,4)"), ("x \\ne 2, 3", "x \\ne 2, 4"),
    ("|x|-3", "|x-3|"), ("\\mathbb{R}\\setminus\\{2\\}", "(-\\infty,3)\\cup(3,\\infty)"),
    ("\\lceil 7/2 \\rceil", "3"), ("\\lfloor x_1 \\rfloor", "1"), ("(0,\\pm 3)", "(0,3,-3)"), ("(A) 5, (B) 6", "A"),
    ("A: 5, B: 6", "A"), ("(B) 45", "A"), ("x\\ne 2", "(-\\infty,3)\\cup(3,\\infty)"),
    ("(A) or C", "A"), ("A. or B", "A"), ("A) 5 or C", "A"), ("(A), 5", "A"), ("3<4", "5<6"), ("5=6", "1=3"),
    ("e^{99}-e^{99}", "7"),
    ("Tom has less than 8.", "8"), ("He doesn't have 8.", "8"), ("x/day", "x"), ("5 m/s", "5 m"),
    ("The value is a - 5", "5"), ("The value is 5 / a", "5"), ("12,3456", "123456"),
    ("They plant 3 trees for every tree they chop so they need to plant 500 trees * 3 = 1500 trees.", "3"),
    ("He has $.6 in dimes because 6 times .1 equals .6", "6"),
    ("y=\\ln 3^2", "y=\\ln 3"), ("f(2)+1 = 5", "5"), ("2f(3) = 5", "5"), ("-f(2) = 5", "5"), ("f(1)+3f(2) = 5", "5"),
    ("x_1^2 = 5", "5"), ("(x-1)(x-2) = 5", "5"), ("4 x 10 = 30", "30"), ("(5/2)x = 5", "5"),
    ("3 x 4 inches", "12 inches"), ("\\log_2 x = 5", "5"), ("\\log_2(x) = 5", "5"), ("f(2)x = 5", "5"),
    ("x + (1/2)x = 5", "5"),
    ("(B) A and C", "B"), ("Yes, but no", "yes"), ("Yes, if n is odd", "Yes"), ("72 minus one", "72"),
    ("No, it is", "Yes"), ("0.(6)", "0.(3)"), ("0.(3)", "0"),
    ("x_1=3, x_2=2", "x_1=2, x_2=3"), ("x=-2, x=3", "[-2,3]"), ("x=2 \\text{ or } x=3", "(2,3)"),
    ("\\frac{Mv}{M+m}", "\\frac{mv}{M+m}"), ("\\frac{mgR}{r}", "\\frac{mgr}{R}"), ("2\\pi Rh", "2\\pi rh"),
    ("m=3, b=2", "(2,3)"), ("5/36 (about 0.139)", "0.139"), ("\\sum a_k = 37", "38"),
    ("3", "\\text{Minimum: } 1, \\text{ maximum: } 3"),
    ("A \\setminus B", "B \\setminus A"), ("p \\implies q", "q \\implies p"), ("f \\circ g", "g \\circ f"),
    ("(iv)", "(vi)"), ("\\overline{A} \\cap B", "A \\cap \\overline{B}"),
    ("\\infty(b-3) = 0", "y = x"), ("57+68 > x = 5", "125"),
    ("I(0)e^{-t}", "I(0)e^{t}"), ("f(0)+x", "x"), ("x \\ge -1, x \\ne 0", "(-1,0)\\cup(0,\\infty)"),
    ("\\begin{cases}x & x\\ge0 \\\\ -x & x<0\\end{cases}", "\\begin{cases}-x & x\\ge0 \\\\ x & x<0\\end{cases}"),
    ("x=2, y=1 \\text{ or } x=1, y=2", "x=2, y=2 \\text{ or } x=1, y=1"),
    ("(x,y) = (2,1)", "1, 2"), ("E.coli", "E"), ("x < 5 = 3", "3"),
    ("A \\cap B = \\{1\\}, A \\cup B = \\{2\\}", "A \\cap B = \\{2\\}, A \\cup B = \\{1\\}"),
    ("\\sum a_k + 5 = 37", "37"), ("2 \\sum a_k = 37", "37"), ("\\lfloor 37.5 \\rfloor + 1 = 37", "37"),
    ("n\\pi", "2k\\pi"), ("n\\pi", "m\\pi"), ("n\\pi+k", "k\\pi+n"), ("2n\\pi", "(n+k)\\pi"), ("2n", "2k"),
    ("①③", "13"), ("①③", "①②"), ("3 cats, n = 5", "5"), ("3 adults = 30, 2 children = 10", "10"),
    ("1st number = 4, 2nd number = 6", "6"), ("2xy + 5 = 11", "11"), ("2 sin(A) = 1", "1"), ("10ab + 5 = 25", "25"),
    ("(2n)!+1", "(2n)!-1"), ("2^{n^2}+n", "2^{n^2}-n"), ("10^{2n}-1", "10^{2n}+1"),
    ("11 sixths", "11"), ("1 sixth", "1"), ("1 half", "1"), ("7 eighths", "7"),
    ("7 sixteenths", "7"), ("one half", "1"), ("one hundred", "1"),
    ("I don't think it is 11", "11"), ("18 = 3 = x", "18"), ("1 third of the class", "1"),
    ("3 to 5", "3"), ("3 to 5", "5"),
    ("x = 2 \\quad x = 3", "3"), ("a = 2 \\quad b = 3", "3"), ("f(x) = 5 \\text{ at } x = 3", "3"),
    ("x=2 \\wedge y=3", "3"), ("x = 2 \\text{ but } y = 3", "3"), ("x = 2 / x = 3", "3"), ("x = 2\nx = 3", "3"),
    ("必要不充分条件", "充分不必要条件"), ("3万", "3"), ("5个半", "5"), ("x^2 when x > 0 and -x^2 otherwise", "x^2"),
    ("The answer is all real numbers not equal to 2.", "\\text{all real numbers}"), ("3x + 2x = 10", "10"),
    ("2x + y = 3x + 1", "3x + 1"), ("A (B)", "A"), ("A (not sure)", "A"), ("not 12 (C)", "C"), ("yes for n ≥ 3", "yes"),
    ("y=-x", "y = x, y = -x"), ("x = 3 cm or x = 5 cm", "5"), ("5 when x > 0", "5 when x < 0"), ("maybe (C)", "C"),
    ("2n for n ≥ 2", "2n for n ≥ 3"), ("x = 2y, x = 3", "2y"), ("x = a+1, x = 5", "5"), ("x = 2, x = 3, x = 4", "4"),
    ("2ⁿ", "2n"), ("(−1)ⁿ", "-n"), ("12 (C)", "B"), ("x^2 + y^2 = 25", "25"),
    ("2^3^2", "64"), ("2x = x", "x"), ("57+68 = x", "125"), ("minus 5", "5"), ("no", "no solution"),
    ("x = 2 \\to y = 3", "3"), ("x = 2 \\Rightarrow y = 3", "3"), ("x = 2 \\land y = 3", "3"), ("(A) and 5", "A"),
    ("So the line is 3x - 2 = 10", "10"), ("Yes, unless n is odd", "yes"), ("True, or false", "true"),
    ("x+1 \\ne 3", "(-\\infty,3)\\cup(3,\\infty)"), ("1 < x < 2 < 3", "(1,2)"), ("2 < x = 3", "(2,3)"),
    ("P(A) = e^{-40}", "P(A) = e^{-50}"), ("e^{-50x}", "0"), ("20!", "2432902008176640001"),
    ("(2+3", "5"), ("|2x|+1", "|3x|+1"), ("\\sec^{-1} x", "\\cos x"), ("\\cot^{-1} x", "\\tan x"),
    ("Yes, but only once", "yes"), ("5 millions", "5"), ("3 hundreds", "3"),
    ("2 hundred thousand", "200"), ("\\mathbb R", "\\mathbb N"),
    ("\\{ x \\in \\mathbb{Z} : x > 1 \\}", "\\{ x \\in \\mathbb{R} : x > 1 \\}"), ("\\ln {x} y", "\\ln(xy)"),
    ("\\{k\\pi \\mid k \\in \\mathbb{Z}\\}", "\\{ k\\pi \\mid k\\in\\mathbb{N}\\}"),
    ("\\arctan{x}^2", "(\\arctan x)^2"),
    ("3 tenths", "3"), ("3 hundredths", "3"), ("2 halves", "2"), ("3 cubed", "3"),
    ("5 " + "a" * 100 + "b", "5 " + "a" * 150 + "c")])  # long units are compared in linear time
def test_another_answer(a, b):
    assert not is_equivalent(a, b) and not is_equivalent(b, a)


HOSTILE = [
    "\\boxed{1}" + "or" * 9980 + "!\\boxed{2}",
    "9" * 10 ** 6, "1" * 20_000 + "!", "{" * 10 ** 5, "\\boxed{" * 10 ** 4, "<answer>" * 10 ** 4, "\\frac" * 10 ** 4,
    "9^9^9^9", "9**9**9", "10^10^10", "(" * 5000, "1e999999999", "99!!!!!!", "!" * 1000, "x^" * 150, "\\sqrt" * 90,
    "," * 399, "1," * 190,
    "(1," * 100, "\ud800\udfff", "\x00", "９９", "A:" * 10 ** 4, "Answer: " * 2000, "the answer is " * 1500, "-" * 399,
    "|" * 399, "[(" * 199, "\\begin{pmatrix}" * 20, "\\infty-\\infty", "1±" * 100, "x=x=x", "<" * 300, "\\log" * 90,
    "\\sin^{2" * 40, "1e300" * 80, "#### " * 5000, "#" * 20_000, "####-\n" * 3333, "\n# Answer\n" * 2000, " " * 20_000,
    "answer is" + " " * 19_000,
    "\\boxed{" * 5 + "{}" * 9900, "\\{\\{1,2\\},\\{2,1\\}\\}," * 16, "99!*" * 99 + "1", "x_", "()", "=", "\\frac{1}{",
    "+".join(f"1/{i}^{{99}}" for i in range(2, 40)), "5 " + "a" * 390, "x=5 " * 90, "\\frac{1}{" * 60, "(\\cos 0)!",
    "a_{1}" * 78 + "x2=5",
    "#### A" + "a" * 10_000 + ":" * 9_980 + "\n", "**Answer:**" + " " * 19_990, "# Answer:" + "\t" * 19_990,
    "# Answer\n" + " \n" * 9_990, "**" * 9_990,
    "Answer" + "*" * 19_000, "\\vec{" * 80, "=" * 200 + "≈" * 200, "1" * 200 + "≈" * 200, "\\pi" * 100 + "≈" * 99,
    "1000000!", "²", "\\sqrt[0.0000000001]{9}", "\u2028" + "\\box{" * 3300 + "}" * 3300,
    "1." + "9" * 150 + "\\overline{" + "9" * 150 + "}", "\\ " * 190, "0^{-1}", "\\log_1 5", "i^i^i", "[]", "[[]]",
    "|x|" * 130, "\\lfloor" * 50, "x_" * 199 + "x", "\\text{(A) " * 40, "The answer is:\n\\[" + " " * 19_900,
    "+".join(["x_9i$\ufdfaabc \\sinx_9"] * 20), "the answer is " + ". a" * 6600, "½" * 400,
    "A: " + "9" * 20_000, "7(" * 9_000,
    "1" * 24 + "\\begin{pmatrix}" + "1&" * 150 + "\\end{pmatrix}", "5 mıllion", "fıve", "FİVE", "5 MİLLİON",
    "\\pi" + "n" * 396 + "!", "\\pi" + "nnnn\\pi" * 60 + "y", "①" * 400]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_raises_or_takes_long(text):
    """Every call takes bounded time, in any thread. It should be 50 ms; half a second of the thread's own time allows
    for slow test machines."""
    def all_of_them():
        for call in (lambda: extract_answer(text), lambda: is_equivalent(text, "5"), lambda: is_equivalent("5", text),
                     lambda: is_equivalent(text[:400], text[:399] + "1"), lambda: format_reward(text),
                     lambda: is_worked_out(text, "5", text), lambda: is_worked_out(text, text, text)):
            began = time.thread_time()  # not what other processes take meanwhile
            call()
            slowest.append(time.thread_time() - began)
    slowest = []
    thread = threading.Thread(target=all_of_them)
    thread.start()
    thread.join()
    assert len(slowest) == 7 and max(slowest) < 0.5


@pytest.mark.parametrize("answer, gold, prompt, worked_out", [
    ("125", "125", "57+68=?", True), ("57+68", "125", "57+68=?", False), ("68 + 57", "125", "57+68=?", False),
    ("x=0 \\text{ or } x=\\pi", "0, \\pi", "", True), ("r=2, \\theta=\\pi", "(2,\\pi)", "", True),
    ("57+68=125", "125", "57+68=?", True), ("125=57+68", "125", "", True), ("x=57+68", "125", "", False),
    ("f(2)=57+68", "125", "", False), ("57@68=1=57+68", "125", "", False), ("5\\star1=9(5)+2=47", "47", "", True),
    ("C(7, 4)", "35", "", False), ("C(7, 4) = 35", "35", "", True), ("x = C(7, 4)", "35", "", False),
    ("1=1. So it is 57+68.", "125", "57+68=?", False), ("We add. " * 50 + "So it is 57+68.", "125", "57+68=?", False),
    ("We add 57+68. So it is 125.", "125", "57+68=?", True),
    ("$57$ + $68$", "125", "", False), ("57\\,+\\,68", "125", "", False), ("57--68", "125", "", False),
    ("|57|+|68|", "125", "", False), ("7(8)", "56", "", False), ("7\\left(8\\right)", "56", "", False),
    ("{5 \\choose 2}", "10", "", False), ("(5)!", "120", "", False), ("1.5 \\times {10}^{3}", "1500", "", True),
    ("\\frac1{2}", "0.5", "", True), ("3 × 10⁸", "300000000", "", True), ("|-3|", "3", "What is $|-3|$?", False),
    ("D. -3", "-3", "", True), ("(B) 3/4", "B", "$\\textbf{(A)}\\ 1/2\\qquad\\textbf{(B)}\\ 3/4$", True),
    ("(B) \\frac34", "B", "$\\textbf{(A)}\\ \\frac12\\qquad\\textbf{(B)}\\ \\frac34$", True),
    ("\\(\\sqrt{50}\\)", "5\\sqrt2", "Simplify $\\sqrt{50}$.", False),
    ("\\left(x+1\\right)^2", "x^2+2x+1", "Expand $(x+1)^2$.", False),
    ("\\dfrac{6}{8}", "\\frac34", "Simplify $\\frac{6}{8}$.", False),
    ("4 x 10 = 40", "40", "", True),
    ("1200+34", "1,234", "", False), ("9 - 7", "2", "", False), ("$9 - $7", "2", "", False),
    ("The sum of $57+68$ is $125$.", "125", "57+68=?", True), ("The sum is $57+68$.", "125", "57+68=?", False),
    ("-5", "-5", "", True), ("½", "0.5", "", True),
    ("5 \\cdot 25", "125", "", False), ("2\\times 10^6", "2000000", "", True), ("2 1/2", "2.5", "", True),
    ("5!", "120", "How many ways?", False), ("\\dbinom{31}{28}", "4495", "", False), ("2^5", "32", "", True),
    ("2^5", "32", "What is $2^5$?", False), ("\\sqrt{16}", "4", "Find $\\sqrt{16}$.", False),
    ("x^{2}+2x+1", "(x+1)^2", "Factor $x^2+2x+1$.", False),
    ("(x + 1)^2", "x^2+2x+1", "Expand $(x+1)^2$.", False), ("1+2x+x^2", "x^2+2x+1", "Expand $(x+1)^2$.", True),
    ("\\frac{6}{8}", "\\frac34", "Simplify $\\frac{6}{8}$.", False), ("1/2", "0.5", "1/2 as a decimal?", False),
    # the gold answer itself, in whatever way it is typed
    ("\\frac{3}{4}", "\\frac34", "Which is it, $\\frac{3}{4}$ or $\\frac{4}{3}$?", True),
    ("\\frac{3}{4}", "3/4", "Which is larger, $\\frac{3}{4}$ or $\\frac{2}{3}$?", True),
    ("11/12", "\\frac{11}{12}", "Is it 11/12?", True), ("$x^{2}+1$", "x^2+1", "Is it $x^{2}+1$?", True),
    ("\\sqrt{2}", "\\sqrt2", "Is it $\\sqrt{2}$?", True), ("x+1", "y = x+1", "Is it $x+1$ or $x-1$?", True),
    ("6/8", "\\frac34", "Simplify $\\frac{6}{8}$.", False), ("\\frac{6}{8}", "3/4", "Simplify 6/8.", False),
    ("144/12", "12", "What is 144 divided by 12?", False), ("\\frac{20}{4}", "5", "20 apples, 4 friends", False),
    ("3/4", "0.75", "$\\frac{13}{4}$ less $\\frac{5}{2}$?", True), ("x+1", "x+1.0", "$x+10$ less 9", True),
    ("12/(1/13)", "156", "12*13=?", False), ("20/4 = 5", "5", "", True), ("3/4", "0.75", "3 of 4", True),
    ("(21)/(3)", "7", "", False), ("\\frac{-144}{12}", "-12", "", False), ("144/(-12)", "-12", "", False),
    ("{144 \\over 12}", "12", "", False), ("36 / 2", "18.00", "", False), ("4 (about 27/7)", "4", "", True),
    ("$4 \\approx \\frac{27}{7}$", "4", "", True), ("1/2 hour", "\\frac{1}{2}", "He rests for 1/2 hour.", True),
    ("x^2-5x+6=0", "(x-2)(x-3)=0", "Factor $x^2-5x+6=0$.", False),  # not the same formula, though both end in 0
    ("The probability is $\\frac{1}{3}$.", "\\frac{1}{3}", "P(A) is 1/3. And P(B)?", True),
    ("5\\text{ cm}", "5", "A square has sides of $5\\text{ cm}$.", True), ("30^\\circ", "30", "$30^\\circ$", True),
    ("18 apples", "18", "He has 18 apples.", True), ("$18", "18", "He has $18.", True),
    ("(0, 1)", "(0,1)", "(0, 1)", True),
    ("57+68", "So it is 57+68.\n#### 125", "", False), ("57+68", "\\boxed{125}", "", False),
    ("So 5(25)", "125", "", False), ("250/2=57+68", "125", "", False), ("So 125", "125", "", True),
    ("x^{-1}", "1/x", "Simplify $x^{-1}$.", False), ("f(x)=x+1", "x+1", "Which is even, x+1 or x^2?", True),
    ("P(X=2)=1/3", "1/3", "Is it 1/3?", True), ("y = 2x+3", "2x - y + 3 = 0", "Is 2x+3 steep?", True),
    ("a_n=2n-1", "2n-1", "Is a_5 = 9 for 2n-1?", True), ("\\sin(x)+1", "\\sin x+1", "Is it $\\sin x+1$?", True),
    # a name or a unit beside the question makes no answer of it
    ("x=\\sqrt{50}", "5\\sqrt2", "Simplify $\\sqrt{50}$.", False), ("2^5 ways", "32", "What is $2^5$?", False),
    ("f(x)=(x+1)^2", "x^2+2x+1", "Expand $(x+1)^2$.", False), ("\\sqrt{16}=\\sqrt{16}", "4", "\\sqrt{16}?", False),
    ("\\sqrt{50} \\text{ cm}", "5\\sqrt2", "Simplify $\\sqrt{50}$.", False),
    ("\\text{Answer}=\\log_2 8", "3", "Find $\\log_2 8$.", False),
    ("\\sin(30^\\circ)", "0.5", "Compute $\\sin 30^\\circ$.", False),
    ("\\sin x\\cos x", "\\frac12\\sin 2x", "Simplify $\\sin(x)\\cos(x)$.", False),
    ("x=5\\sqrt2", "5\\sqrt2", "Simplify $\\sqrt{50}$.", True), ("y=x+1", "x+1", "Where does x+1 lie?", True),
    ("\uff15\uff17\uff0b68", "125", "57+68=?", False),
    ("[57]+[68]", "125", "57+68=?", False), ("7[8]", "56", "", False), ("=5768=57+68", "125", "57+68=?", False),
    ("（57）+（68）", "125", "57+68=?", False), ("57\\degree+68^ \\circ", "125", "57+68=?", False),
    ("\\sum x^2 = 57+68", "125", "57+68=?", False), ("57¹+68", "125", "57+68=?", False),
    ("57º+68˚", "125", "57+68=?", False), ("57th+68th", "125", "57+68=?", False), ("57+68", "125 cm", "", False),
    ("10^3-10^2", "900", "", False), ("57+68", "125 \\text{ cm}", "57+68=?", False), ("125 cm", "125", "", True),
    # a number is worked out, in whatever way it is typed, and anything that only has its value is not
    *((typed, "125", "", False) for typed in (
        "57x/x+68", "{25}{5}", "5\\sqrt{625}", "1 hundred+25", "\\sqrt{15625}", "\\frac{250}{2}", "\\log(10^{125})",
        "125\\tan 45^\\circ", "5^2*5", "|-125|")),
    ("The remaining 72-48 is sold", "24", "", False), ("2 million", "2000000", "", True), ("5:00 pm", "5", "", True),
    ("144/12", "12 m/s", "", False), ("12 m/s", "12 m/s", "", True), ("3A", "3 A", "", True),
    *((typed, "2.5", "", True) for typed in (
        "5/2", "2\\frac12", "The answer is 2 1/2.", "(D) 2\\frac12", "25*10^{-1}")),
    *((typed, "\\frac52", "", False) for typed in (
        "2+1/2", "(2+\\frac12)", "\\frac12+2", "5*\\frac12", "\\sqrt{6.25}")),
    ("0.1\\overline{6}", "1/6", "", True), ("0.1+6/90", "1/6", "", False),
    ("x=1, y=2", "(1,2)", "", True), ("x=3-2, y=2", "(1,2)", "", False), ("(3-2,2)", "(1,2)", "", False),
    ("x=\\pm\\frac12", "\\pm 0.5", "", True), ("1,1+1", "1,2", "", False), ("{2,1}", "x=1\\text{ or }x=2", "", True),
    ("x > 5", "(5,\\infty)", "", True), ("x > 2+3", "(5,\\infty)", "", False), ("(-inf, 2)", "x<2", "", True),
    ("25e-1", "2.5", "", True), ("{10}^3", "1000", "", True), ("3*10", "30", "", False), ("125.", "125", "", True),
    ("\\left(\\frac12\\right)", "1/2", "Is it 1/2?", True), ("+1/2", "\\frac12", "Is it 1/2?", True),
    ("2x-10=0", "x=5", "", False), ("5=x", "x=5", "", True), ("(x+1)(x-1)", "x^2-1", "Expand $(x+1)(x-1)$.", False),
    ("(-infinity, 3]", "(-\\infty,3]", "", True), ("125=x", "x=125", "", True), ("{1}/{2}", "0.5", "", True),
    ("\\frac{(-1)}{2}", "-0.5", "", True), ("\\frac{+1}{2}", "0.5", "", True), ("2.5*10^{+6}", "2500000", "", True),
    ("(144/12, 0.5)", "(12, 0.5)", "", False), ("x=144/12, y=1/2", "x=12, y=\\frac12", "", False),
    ("1/4+1/4", "1 / 2", "", False), ("50\\frac72", "53.5", "50 + 7/2", False), ("50 7/2", "53.5", "", False),
    ("(5^3)", "125", "What is $5^3$?", False), ("+5^3", "125", "What is $5^3$?", False),
    ("((6/8))", "\\frac34", "Simplify $\\frac{6}{8}$.", False),
    ("(x+1)^2\\\\", "x^2+2x+1", "Expand $(x+1)^2$.", False), ("So (x+1)^2", "x^2+2x+1", "Expand $(x+1)^2$.", False),
    ("negative 2^5", "-32", "What is -2^5?", False), ("minus 3x+5x", "2x", "Simplify -3x+5x.", False),
    ("5 = x", "5", "", True), ("5²", "25", "What is 5²?", False), ("2^{10}", "1024", "Compute 2¹⁰.", False),
    ("2 million", "2000000", "Write $2\\times10^6$ in standard form.", True),
    ("25 square cm", "25", "A square has area 25 cm^2.", True), ("5 m/s", "5", "A bike goes 5 m/s.", True),
    ("y=(x+1)^2", "x^2+2x+1", "(x+1)^2 = ?", False), ("y=(x+1)(x-1)", "x^2-1", "$(x+1)(x-1)$", False),
    ("125 or 57+68", "125", "57+68=?", True), ("57+68, 57+68", "125", "57+68=?", False),
    ("(x+1)^2, (x+1)^2", "x^2+2x+1", "Expand (x+1)^2", False), ("125 or 125.0", "125", "57+68=?", True),
    ("f(2)=5^3", "125", "What is $5^3$?", False), ("f(2)=\\sqrt{50}", "5\\sqrt2", "Simplify $\\sqrt{50}$.", False),
    ("(C) 57+68", "125", "57+68=? (A) 125 (C) 57+68", False),
    # a gold answer that is a choice: its letter, or what it stands for
    ("68+57", "\\textbf{(C)}\\ 125", "57+68=?", False), ("C", "\\textbf{(C)}\\ 125", "57+68=?", True),
    ("x=125", "(C) 125", "", True), ("(C) 125", "(C) 125", "", True), ("\\text{C}", "(C) 125", "", True),
    ("The answer is (C).", "(C) 125", "", True),
    ("\\frac34", "\\textbf{(B)}\\ \\frac{3}{4}", "$\\textbf{(B)}\\ \\frac{3}{4}$", True),
    ("y=2x-3", "2x-y=3", "", True), ("2(x+1)", "2x+2", "", True), ("(A) or C", "A and C", "", True),
    ("\\frac13\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1/3\\\\2/3\\end{pmatrix}", "", True),
    ("50+75", "a+b=125", "", False), ("y = -x+3", "x+y=3", "Which line?", True),
    ("m+n = 3+4 = 7", "7", "What is m+n?", True),
    ("x = 57+68", "x = 125", "Solve x = 57+68.", False), ("(-\\infty, 2)", "x<2", "", True),
    ("\\{57+68\\}", "\\{125\\}", "", False), ("(x+1)^2", "x^2+2x+1", "Expand $\\left(x+1\\right)^2$.", False),
    ("1/2", "0.5", "Write $\\frac12$ as a decimal.", False),
    ("It is \\arctan(1/2)+\\arctan(1/3)", "\\frac{\\pi}{4}", "Compute \\arctan(1/2)+\\arctan(1/3).", False),
    ("\\tan 60°", "\\sqrt3", "Compute $\\tan 60^\\circ$.", False)])
def test_the_question_is_no_answer(answer, gold, prompt, worked_out):
    assert is_equivalent(answer, gold) and is_worked_out(answer, gold, prompt) == worked_out


@pytest.mark.parametrize("sign", "to rightarrow Rightarrow implies setminus backslash subset subseteq supset "
                         "supseteq circ bmod neg lnot leftarrow Leftarrow longrightarrow mapsto ll gg".split())
def test_what_stands_beside_these_signs_keeps_its_place(sign):
    assert not is_equivalent(f"p \\{sign} q", f"q \\{sign} p")


@pytest.mark.parametrize("text, reward", [
    ("<think>a</think><answer>b</answer>", 1.0), (" <think>\n</think> \n<answer>b</answer>\n", 1.0),
    ("<think>a</think> so <answer>b</answer>", 0.0), ("<think>a</think><answer>b</answer>.", 0.0),
    ("<answer>b</answer><think>a</think>", 0.0), ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
    ("<answer>b</answer>", 0.0), ("", 0.0), ("<think><answer>a</think>b</answer>", 0.0)])
def test_format_reward(text, reward):
    assert format_reward(text) == reward


def test_the_form_that_the_system_prompt_shows_earns_the_format_reward():
    shown = SYSTEM_PROMPT[SYSTEM_PROMPT.index("<"):].removesuffix(".")
    assert format_reward(shown) == 1 and extract_answer(shown) == "answer here"


@pytest.mark.parametrize("word", "Final Part Method Alternative Analysis Setup Calculation Given Summary Result Key "
                         "Additional Example Problem Question".split())
def test_a_heading_with_a_text_below_is_no_answer(word):
    assert extract_answer(f"\\boxed{{18}}\n\n#### {word} 2\nWe added.") == "18"


@pytest.mark.parametrize("word", "Step Case Note Check Solution Explanation Verification Conclusion".split())
def test_a_heading_alone_is_no_answer(word):
    assert extract_answer(f"\\boxed{{18}}\n#### {word}") == extract_answer(f"\\boxed{{18}}\nAnswer: {word} 1") == "18"


@pytest.mark.parametrize("word", "not never cannot but minus negative most least half twice double triple none dozen "
                         "pi sqrt log mod".split())
def test_words_that_may_change_the_number_of_a_sentence(word):
    assert is_equivalent("Janet makes 18 every day", "18")
    assert not is_equivalent(f"Janet makes {word} 18 every day", "18")


@pytest.mark.parametrize("verb", ["is", "are", "should be", "must be", "would be", "will be", "equals", "is simply",
                                  "is just", "is indeed", "is actually", "is only", "is equal to", "is given by", "=",
                                  "is then", "is thus", "is therefore", "is therefore,"])
@pytest.mark.parametrize("reason", ["", " because", " since", ", so", ", as", ", which"])
def test_ways_to_say_the_answer_and_why(verb, reason):
    assert extract_answer(f"I think the answer {verb} 18{reason and reason + ' 9+9 is that'}.") == "18"


@pytest.mark.parametrize("size", ["left right", "big big", "bigl bigr", "Big Big", "Bigl Bigr", "bigg bigg",
                                  "Bigg Bigg"])
def test_sizes_of_brackets_change_nothing(size):
    before, after = size.split()
    assert is_equivalent(f"\\{before}(1,\\frac12\\{after})", "(1,0.5)")


@pytest.mark.parametrize("typed", [
    *(f"\\{size} 1,234" for size in ("displaystyle", "large", "Large", "LARGE", "huge")),
    *(f"{sign}1,234" for sign in ("\\$", "$", "€", "£", "₹", "¥")),
    "1,234\\%", "1,234%", "1234¢", "\\(1234\\)", "\\[1234\\]",
    *(f"\\{font}{{1234}}" for font in (
        "textrm", "textit", "texttt", "mathit", "mathsf", "mathcal", "emph", "bm", "underline")),
    *(f"1{space}234" for space in ("\\,", "\\:", "\\;", "~", "{,}", "\\!")), "\\quad 1234", "\\qquad 1234"])
def test_ways_to_write_a_number(typed):
    assert is_equivalent(typed, "1234") and not is_equivalent(typed, "1235")
